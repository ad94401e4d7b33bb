// What connects the ranks of one host once a bootstrap has made them meet: a Unix socket between
// every two, which carries blobs, file descriptors and, by closing, the news that a peer has died.
//
// Ranks are processes, or threads of one process with one Rendezvous each. Every call below but
// on_peer_loss and close is collective: all ranks make it with the same tag. Calls with different
// tags may run at once; the n-th call with a tag meets the n-th of every peer, also after a
// timeout. No call outlives its deadline. Nothing is told or handed to who has not proved to be a
// rank of the job (proof.h). Errors: timeout (names the missing ranks), peer (a rank died or left),
// mismatch (ranks disagree about the world or its secret), invalid (bad arguments, ranks of several
// hosts, or of several users without a secret), driver (a socket fails), and the bootstrap's own.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/base/descriptor.h"
#include "core/base/fork.h"
#include "core/ir/command.h"
#include "core/window/bootstrap.h"

namespace offcore {

// What one rank hands to all others in an exchange.
struct Parcel {
  std::string blob;
  Descriptor fd;  // empty: none
};

inline constexpr uint64_t kBlobBytesMax = 16 << 20;

class Rendezvous : public OfProcess {
 public:
  Rendezvous() : OfProcess("the rendezvous") {}
  // Returns when all are connected.
  static std::shared_ptr<Rendezvous> join(const Bootstrap& bootstrap, const Deadline& deadline);
  virtual ~Rendezvous() = default;  // says goodbye like close()

  virtual Rank rank() const = 0;
  virtual Rank ranks() const = 0;

  // Every rank's parcel, by rank. This rank's own comes back with its blob and without a
  // descriptor. `fd` stays the caller's; -1: none. A received descriptor is a duplicate, closed on
  // exec.
  virtual std::vector<Parcel> exchange(std::string_view tag, std::string_view blob, int fd,
                                       const Deadline& deadline) = 0;

  std::vector<std::string> all_gather_bytes(std::string_view tag, std::string_view blob,
                                            const Deadline& deadline);
  // Throws mismatch when a peer hands over none. Own entry: empty.
  std::vector<Descriptor> exchange_fds(std::string_view tag, int fd, const Deadline& deadline);
  void barrier(std::string_view tag, const Deadline& deadline);

  // Calls back once for every peer whose process ended without a goodbye, from the watcher thread
  // (also for those already lost). Replaces an earlier callback, and returns only when that one is
  // not running; null removes it. The callback must not call into this object.
  virtual void on_peer_loss(std::function<void(Rank)> callback) = 0;

  // Says goodbye: peers do not count this rank as lost. No call may follow but close itself.
  virtual void close() = 0;
};

}  // namespace offcore
