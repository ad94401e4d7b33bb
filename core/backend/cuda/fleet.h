// The local GPUs at work: the streams of every lane, and what is under way on them.
//
// Everything that a caller queue does goes into the caller's stream, and one engine queue with it;
// further engine queues have streams of their own, forked from the caller's and joined to it by
// events. Launches of a lane are in order whatever streams they come in.
//
// A GPU waits for a word for ever, whoever has died. So a launch that is poisoned is released: its
// awaited words are written, from a stream of its own, until all its streams are through. What was
// queued behind the waits runs then; the memory stays mapped until it has.
#pragma once
#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/words.h"

namespace offcore::cuda {

// A stream and a word of its own.
class Line {
 public:
  Line(const std::shared_ptr<const Device>& device, const std::shared_ptr<Words>& words)
      : word_(device, words), stream_(device->stream()) {}
  CUstream stream() const { return stream_->handle(); }
  CUdeviceptr word() const { return word_.address(); }

 private:
  Word word_;
  std::unique_ptr<Stream> stream_;
};

// Engine queues of one armed program, enqueued ahead of their launch behind their gates.
struct Parked {
  Launch launch;
  uint32_t turn = 0;                      // the gates' value that lets them go
  std::vector<std::vector<Event>> joins;  // by local program, then engine queue
  Notes notes = {};
};

// An armed program's own streams, and rings that its parked commands go through.
struct Hangar {
  struct Bay {
    std::unique_ptr<Line> line;
    std::unique_ptr<Word> gate;
  };
  std::vector<std::vector<Bay>> bays;  // as Parked::joins
  uint32_t turn = 0;
  Doubles doubles;
  std::vector<std::unique_ptr<Ring>> retired;  // doubles of windows that were replaced
  std::deque<Parked> parked;
  uint32_t recalls = 0;
  size_t lines = 0;  // of a device, that it takes from the room for parked ones
};

constexpr double kGraceS = 2.0;    // what is under way may still end by itself
constexpr double kRunOutS = 10.0;  // what is let run out does

class Fleet {
 public:
  Fleet(Rank ranks, std::vector<std::shared_ptr<Device>> devices, Habits habits);

  const std::vector<std::shared_ptr<Device>>& devices() const { return devices_; }
  const std::shared_ptr<Rings>& rings() const { return rings_; }
  Rank ranks() const { return ranks_; }
  const Habits& habits() const { return habits_; }

  // Tries one strided copy to all ranks in a new ring, the first of its kind, and tells the ring.
  void try_strided(Ring& ring);
  // Lets copy engines copy within the local GPUs, if the ring has memory of another one.
  void alias_copies(const Ring& ring);
  // False once that has failed: such commands are done row by row.
  bool strided() const { return strided_works_; }

  std::shared_ptr<Flight> launch(std::shared_ptr<const Cargo> cargo, const Launch& launch,
                                 Hangar& hangar);
  uint64_t capture_of(std::span<const uintptr_t> streams) const {
    return captures_.capture_of(streams);
  }
  bool gone(uint64_t capture) { return captures_.gone(capture); }
  // Into the captures that the launch's streams are in (see capture.h).
  std::shared_ptr<Flight> record(std::shared_ptr<const Cargo> cargo, const Launch& launch);
  // False where the program cannot be enqueued ahead, or enough of them are parked already.
  bool park(const std::shared_ptr<const Cargo>& cargo, const Launch& launch, Hangar& hangar);
  // Lets what is parked run out without effect.
  void dismiss(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar);
  // As dismiss, while the communicator lives on: waits for launches of the program before.
  void recall(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar);
  // Throws timeout, peer, driver, or cancelled after close().
  void wait(Flight& flight, const Deadline& deadline);
  // Makes a stream wait for the launch's end.
  void hold(const Flight& flight, uintptr_t stream) const;
  // Ends what is under way; nothing can be launched afterwards.
  void close();

 private:
  struct Lane {
    std::unique_ptr<Line> caller;
    std::unique_ptr<Presets> presets;
    std::vector<std::unique_ptr<Line>> engines;  // made when needed
    CUstream last_stream = nullptr;
    std::shared_ptr<const Event> last_done;
  };
  // One local rank's part of a launch that is being enqueued.
  struct Turn {
    const LocalProgram* local;
    const Device* device;
    Lane* lane;
    CUstream stream;  // where the caller queue goes
    CUstream named;   // the caller's, where that is the per-thread default stream; else null
    Flight::Part* part;
    std::unique_ptr<Feed> own;  // into the caller's stream
    std::vector<Event> joins;
  };

  Lane& lane(uint32_t index, uint32_t device);
  Line& engine(Lane& lane, uint32_t device, size_t index);
  void check_launch(const Cargo& cargo, const Launch& launch) const;  // throws Refused
  void check_places(const Cargo& cargo, const Launch& launch) const;  // throws invalid
  void enqueue(Flight& flight, std::vector<Turn>& turns, const Hangar& hangar,
               const Parked* parked);
  bool untouched(const Flight& flight) const;
  void abandon(Flight& flight, std::vector<Turn>& turns);
  Turn begin(Flight& flight, const LocalProgram& local);
  void fork(Turn& turn);
  void engines(Flight& flight, Turn& turn);
  void resume(Flight& flight, Turn& turn, const Hangar& hangar, const Parked& parked, size_t index);
  void end(Flight& flight, Turn& turn);
  Feed feed(const Flight& flight, const Turn& turn, CUstream stream, CUdeviceptr word) const;
  std::vector<std::shared_ptr<void>> reap();
  void retire(Flight& flight);
  void release(const std::vector<std::shared_ptr<Flight>>& flights);
  std::vector<std::shared_ptr<Flight>> poisoned() const;
  void release_poisoned();
  std::vector<std::shared_ptr<Flight>> flying(const std::shared_ptr<const Cargo>& cargo);
  void run_out(const std::shared_ptr<const Cargo>& cargo, Hangar& hangar);
  bool make_bays(const Cargo& cargo, Hangar& hangar);
  void double_rings(const Cargo& cargo, const Launch& launch, Hangar& hangar);

  const Rank ranks_;
  const std::vector<std::shared_ptr<Device>> devices_;
  const Habits habits_;
  const std::string channels_;  // of a GPU: the driver asks when it starts
  const std::shared_ptr<Rings> rings_;
  const std::shared_ptr<Words> words_;
  Captures captures_;
  std::mutex mutex_;                                     // of all below
  std::map<std::pair<uint32_t, uint32_t>, Lane> lanes_;  // by lane, device
  std::list<std::shared_ptr<Flight>> flying_;
  std::optional<bool> tried_[2];  // by whether the stride is within the pitch limit
  size_t parked_lines_ = 0;
  bool closed_ = false;
  std::atomic<bool> strided_works_{true};
};

}  // namespace offcore::cuda
