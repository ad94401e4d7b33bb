// Stream capture and graphs. A captured graph keeps the work of each captured stream as a lane:
// lanes run at once, each in order, and wait for one another where events crossed them.
#pragma once
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/stream.h"
#include "tests/fakes/cuda/user_object.h"

namespace fakecuda {

struct Node {
  int lane = 0;
  std::vector<int> after;  // nodes of other lanes; the lane's own order holds besides
  Work work;
  std::shared_ptr<Context> context;
};

struct Graph {
  std::vector<Node> nodes;  // each after what it waits for
  int lanes = 1;
  std::vector<Reference> references;
};

// Lives until it is destroyed and its launches have run.
struct GraphExec {
  explicit GraphExec(const Graph& of) : graph(of) {}
  const Graph graph;
  std::mutex running;  // a graph does not overlap itself
  Result run(Engine& engine);
};

// All functions expect capture_mutex() to be held.
class Capture {
 public:
  static void begin(Stream& stream, int mode);
  // The graph, or a failure, and then there is none; either way the streams are out of the capture.
  static GraphHandle end(Stream& stream);

  void add(Stream& stream, Work work);
  void record(Stream& stream, Event& event);  // the event stands for the stream's place
  void join(Stream& stream, const Event& event);
  void invalidate() { invalidated_ = true; }
  bool invalidated() const { return invalidated_; }
  bool active() const { return active_; }
  int mode() const { return mode_; }
  uint64_t id() const { return id_; }
  GraphHandle graph() const { return handle_; }
  std::thread::id owner() const { return owner_; }

 private:
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();  // until it ends
  GraphHandle handle_ = nullptr;
  std::vector<std::weak_ptr<Stream>> streams_;  // by lane
  std::thread::id owner_;
  int mode_ = kCaptureGlobal;
  uint64_t id_ = 0;
  bool invalidated_ = false;
  bool active_ = true;
};

Registry<Graph, GraphHandle>& graphs();
uint64_t live_graphs();

// Fails with `code`, and spoils the capture, if the stream is being captured.
void refuse_in_capture(Stream& stream, Result code = kCaptureUnsupported);
// Whether a stream that this default stream would have to order itself against is in a capture.
std::shared_ptr<Capture> blocking_capture(Stream& legacy);
// The same for what a capture makes unsafe: what allocates, maps, frees, waits or asks. This
// thread's own captures forbid it, and global ones of all threads, as far as its mode heeds them.
void refuse_unsafe();
// The calling thread's capture mode; returns the one before.
int exchange_mode(int mode);

}  // namespace fakecuda
