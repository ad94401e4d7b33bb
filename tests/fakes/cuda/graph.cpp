#include "tests/fakes/cuda/graph.h"

#include <algorithm>
#include <deque>
#include <list>
#include <set>
#include <utility>

#include "tests/fakes/cuda/settings.h"

namespace fakecuda {
namespace {

// The captures under way; guarded by capture_mutex().
std::set<Capture*>& captures() {
  static auto* const value = new std::set<Capture*>;
  return *value;
}

thread_local int thread_mode = kCaptureGlobal;

void run_node(const Node& node, Engine& engine) {
  if (node.context->error != kSuccess) return;
  Engine own{*node.context, engine.random};
  if (const Result code = node.work(own)) node.context->fail(code);
}

// Nodes so that each comes after what it waits for, and after its lane's earlier ones.
std::vector<size_t> any_order(const Graph& graph, std::mt19937_64& random) {
  std::vector<std::deque<size_t>> lanes(static_cast<size_t>(graph.lanes));
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    lanes[static_cast<size_t>(graph.nodes[i].lane)].push_back(i);
  }
  std::vector<bool> done(graph.nodes.size(), false);
  std::vector<size_t> order;
  while (order.size() < graph.nodes.size()) {
    auto& lane = lanes[random() % lanes.size()];
    if (lane.empty()) continue;
    const Node& node = graph.nodes[lane.front()];
    const auto is_done = [&](int before) { return bool{done[static_cast<size_t>(before)]}; };
    if (!std::ranges::all_of(node.after, is_done)) continue;
    order.push_back(lane.front());
    done[lane.front()] = true;
    lane.pop_front();
  }
  return order;
}

}  // namespace

void Capture::begin(Stream& stream, int mode) {
  require(!stream.is_legacy(), kCaptureUnsupported);
  require(!stream.capturing.capture, kIllegalState);
  static uint64_t made = 0;
  auto capture = std::make_shared<Capture>();
  capture->id_ = ++made;
  capture->handle_ = graphs().add(capture->graph_);
  capture->mode_ = mode;
  capture->owner_ = std::this_thread::get_id();
  capture->streams_.push_back(stream.weak_from_this());
  captures().insert(capture.get());
  stream.capturing = {std::move(capture), 0, -1, {}};
}

GraphHandle Capture::end(Stream& stream) {
  const auto capture = stream.capturing.capture;
  require(capture != nullptr, kIllegalState);
  require(stream.capturing.lane == 0, kCaptureUnmatched);
  require(capture->mode_ == kCaptureRelaxed || capture->owner_ == std::this_thread::get_id(),
          kCaptureWrongThread);
  // Everything must have come back to the first stream: its place has to follow every lane's end.
  const std::shared_ptr<Graph> graph = std::move(capture->graph_);
  const auto& nodes = graph->nodes;
  std::vector<bool> joined(nodes.size(), false);
  for (const int node : stream.capturing.next) joined[static_cast<size_t>(node)] = true;
  if (stream.capturing.last >= 0) joined[static_cast<size_t>(stream.capturing.last)] = true;
  std::vector<bool> lane_joined(static_cast<size_t>(graph->lanes), false);
  bool all = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    const auto lane = static_cast<size_t>(nodes[i].lane);
    joined[i] = joined[i] || lane_joined[lane];
    all = all && joined[i];
    if (!joined[i]) continue;
    lane_joined[lane] = true;
    for (const int before : nodes[i].after) joined[static_cast<size_t>(before)] = true;
  }
  for (const auto& member : capture->streams_) {
    if (const auto other = member.lock()) other->capturing = {};
  }
  capture->active_ = false;
  captures().erase(capture.get());
  if (all && !capture->invalidated_) return capture->handle_;
  graphs().remove(capture->handle_);
  throw Failure{capture->invalidated_ ? kCaptureInvalidated : kCaptureUnjoined};
}

void Capture::add(Stream& stream, Work work) {
  require(!invalidated_, kCaptureInvalidated);
  auto& place = stream.capturing;
  graph_->nodes.push_back({place.lane, std::move(place.next), std::move(work), stream.context()});
  place.next.clear();
  place.last = static_cast<int>(graph_->nodes.size()) - 1;
}

void Capture::record(Stream& stream, Event& event) {
  require(!invalidated_, kCaptureInvalidated);
  const std::lock_guard lock(event.mutex);
  event.capture = stream.capturing.capture;
  event.marker = nullptr;
  event.nodes = stream.capturing.next;
  if (stream.capturing.last >= 0) event.nodes.push_back(stream.capturing.last);
}

void Capture::join(Stream& stream, const Event& event) {
  require(!invalidated_, kCaptureInvalidated);
  auto& place = stream.capturing;
  if (!place.capture) {
    place = {event.capture, graph_->lanes++, -1, {}};
    streams_.push_back(stream.weak_from_this());
  } else if (place.capture.get() != this) {
    invalidate();
    place.capture->invalidate();
    throw Failure{kCaptureMerge};
  }
  place.next.insert(place.next.end(), event.nodes.begin(), event.nodes.end());
}

std::shared_ptr<Capture> blocking_capture(Stream& legacy) {
  const std::lock_guard lock(capture_mutex());
  const std::lock_guard context_lock(legacy.context()->mutex);
  for (const auto& other : legacy.context()->blocking) {
    const auto blocking = other.lock();
    if (blocking && blocking->capturing.capture) return blocking->capturing.capture;
  }
  return nullptr;
}

void refuse_in_capture(Stream& stream, Result code) {
  if (stream.is_legacy()) {
    if (const auto capture = blocking_capture(stream)) {
      capture->invalidate();
      throw Failure{kCaptureImplicit};
    }
  }
  const std::lock_guard lock(capture_mutex());
  if (!stream.capturing.capture) return;
  stream.capturing.capture->invalidate();
  throw Failure{code};
}

void refuse_unsafe() {
  if (thread_mode == kCaptureRelaxed) return;
  const std::lock_guard lock(capture_mutex());
  for (Capture* capture : captures()) {
    const bool ours = capture->owner() == std::this_thread::get_id();
    const bool forbids = ours ? capture->mode() != kCaptureRelaxed
                              : capture->mode() == kCaptureGlobal && thread_mode == kCaptureGlobal;
    if (!forbids) continue;
    capture->invalidate();
    throw Failure{kCaptureUnsupported};
  }
}

int exchange_mode(int mode) { return std::exchange(thread_mode, mode); }

Result GraphExec::run(Engine& engine) {
  const std::lock_guard alone(running);
  take_over(&running);
  if (settings().serial_graphs) {
    for (const size_t node : any_order(graph, engine.random)) run_node(graph.nodes[node], engine);
    pass_on(&running);
    return kSuccess;
  }
  std::vector<Marker> done(graph.nodes.size());
  const auto run_lane = [&](int lane, std::mt19937_64& random) {
    const Hidden hidden;
    Engine own{engine.context, random};
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      const Node& node = graph.nodes[i];
      if (node.lane != lane) continue;
      for (const int before : node.after) done[static_cast<size_t>(before)].wait();
      run_node(node, own);
      done[i].pass();
    }
  };
  std::list<std::mt19937_64> randoms;
  std::vector<std::thread> others;
  for (int lane = 1; lane < graph.lanes; ++lane) {
    auto& random = randoms.emplace_back(engine.random());
    const Shown shown;
    others.emplace_back([&, lane] { run_lane(lane, random); });
  }
  run_lane(0, engine.random);
  for (auto& other : others) {
    const Shown shown;
    other.join();
  }
  pass_on(&running);
  return kSuccess;
}

}  // namespace fakecuda
