// Takes in connections of whoever comes, strangers among them, all at once: one that says nothing
// keeps nobody waiting. Who has not proved to be a rank has seconds for it, says little, and is
// hung up on where too many come.
#pragma once
#include <list>
#include <optional>
#include <vector>

#include "core/base/clock.h"
#include "core/base/descriptor.h"
#include "core/window/proof.h"
#include "core/window/socket.h"

namespace offcore {

class Reception {
 public:
  virtual ~Reception() = default;

 protected:
  struct Guest {
    Connection connection;
    int door = -1;                 // the listener that it came by; -1: this rank called it
    bool stranger = true;          // has not proved to be of this job, nor been called
    std::optional<uint32_t> rank;  // whose place it has, or has to have proved if it was called
    std::optional<Seal> seal;
    bool gone = false;
    int64_t since_ns = now_ns();
  };

  // `said_bytes_max`: of one frame of a guest. `ranks`: that may come at the same moment.
  Reception(uint64_t said_bytes_max, size_t ranks)
      : said_bytes_max_(said_bytes_max), strangers_max_(kStrangersMax + ranks) {}

  void open(int door) { doors_.push_back(door); }
  Guest& seat(Descriptor socket, int door);
  // Waits, a moment at most, until somebody comes or says something, and calls back.
  void step(const Deadline& deadline);

  virtual bool admits(int fd, int door) = 0;
  // Guests that are `gone` afterwards are hung up on.
  virtual void hear(Guest& guest, const Frame& frame) = 0;
  virtual void lose(Guest& guest) = 0;  // it has hung up, or talks nonsense

  std::list<Guest> guests_;

 private:
  static constexpr size_t kStrangersMax = 256;
  void attend(Guest& guest, Connection::Status status);
  void admit(int door);
  bool turn_out_oldest();

  const uint64_t said_bytes_max_;
  const size_t strangers_max_;
  std::vector<int> doors_;
};

}  // namespace offcore
