// What the shim keeps beside a communicator of NCCL's: ours, made when the first call comes that it
// may carry, and counts of what went where.
//
// Ranks meet in a communicator's first collective, by NCCL's own all-gather: are they on one host,
// and told to take the same. Before that a rank does not know what others would take. At the first
// call that may be taken they settle whether they have one of ours: with peer access, and opening
// has worked for each. They settle once more at the first call of each operation and size, where
// memory may be short: so all of them go by our communicator, or none. What is known to one rank
// alone never decides. Each makes the host wait for the others, as a NCCL communicator's first call
// does; later calls do not.
#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "core/comm/communicator.h"
#include "shim/call.h"
#include "shim/exchange.h"
#include "shim/policy.h"

namespace offcore::shim {

// Differs from thread to thread, on all hosts. What a thread has others do for it bears its own.
uint64_t& driver_of_thread();

// Of the ranks of a communicator: they have not met yet; some calls may be ours; none is.
enum class Standing : uint8_t { unmet, met, given_up };

class Companion {
 public:
  // `comm` is NCCL's, ready for calls.
  Companion(Comm comm, const Policy& policy) : comm_(comm), policy_(policy) {}

  // Runs the call on its stream; none: NCCL is to do it, on all ranks. The call is computable.
  std::optional<NcclResult> run(const Call& call);
  // Whether that need not wait for other ranks.
  bool ready(const Call& call);
  // A stream for what the calling thread would have in its default one, behind all that it has
  // there; and makes that wait for it.
  Stream aside();
  void join_aside();
  Standing standing() const { return standing_; }
  // Memory at the same place on all ranks, which have added it before their next collective. That
  // registers it: ranks may come from others of theirs by then.
  void add_window(NcclWindow window, void* data, uint64_t bytes);
  void deregister_window(NcclWindow window);

  // Whether a rank of ours has died or aborted. What waits for it on the stream ends then.
  bool failed();
  std::string last_error() const;
  // Waits for what is under way, and leaves the others.
  void finish();
  // Makes all ranks' waits fail.
  void abort();

  void count(const Call& call, bool taken);
  std::string report() const;  // what was taken and what was forwarded

 private:
  struct Region {
    NcclWindow window;
    std::byte* data;
    uint64_t bytes;
    std::optional<uint32_t> number = {};  // none: not registered yet
  };
  struct Count {
    uint64_t taken = 0;
    uint64_t forwarded = 0;
  };
  using Key = std::tuple<Collective, uint64_t, int, int, int>;

  Key key_of(const Call& call) const {
    return {call.collective, total_bytes(call, exchange_->ranks()), call.dtype, call.op, call.root};
  }
  void learn();
  void order(cuda::CUstream from, cuda::CUstream to) const;
  bool captured(const Call& call) const;
  bool below(const Call& call) const;
  Exchange& exchange_in(std::unique_ptr<Exchange>& place, size_t text_max);
  void meet();
  std::string difference(const std::vector<std::string>& told) const;
  void settle();
  std::string obstacle(const std::vector<std::string>& told) const;
  std::string facts() const;
  std::string open(int device, const Deadline& deadline);
  bool has_added() const;
  void register_added();
  bool in_window(const Call& call) const;
  void start(const Call& call, const Deadline& deadline);
  std::optional<NcclResult> start_first(const Call& call, const Key& key);
  NcclResult failed_with(const Error& error, const Call& call);
  void give_up(const std::string& why);
  void settle_last();  // waits for what is under way
  void release();      // the same of what fails, whose failure is known
  std::shared_ptr<Communicator> communicator() const;
  void set_communicator(std::shared_ptr<Communicator> made);
  std::shared_ptr<Pending> exchange_last(std::shared_ptr<Pending> next);

  const Comm comm_;
  const Policy& policy_;
  std::mutex mutex_;  // one call at a time; of what follows
  // What NCCL says of its communicator, asked once.
  int ranks_ = 0;
  int rank_ = 0;
  std::shared_ptr<const cuda::GpuContext> home_;  // null: not asked yet
  std::unique_ptr<cuda::CudaStream> aside_;
  std::atomic<Standing> standing_{Standing::unmet};  // any thread may look
  bool settled_ = false;
  std::string gpu_;              // as the driver names it
  std::set<Key> agreed_;         // what ranks have done together by ours
  std::set<Key> declined_;       // what the root began in place
  std::vector<Region> windows_;  // in the order of all ranks

  mutable std::mutex state_mutex_;      // of what follows; never held while something waits
  std::unique_ptr<Exchange> meeting_;   // made once, as the next
  std::unique_ptr<Exchange> exchange_;  // of those that may have a communicator
  bool aborted_ = false;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Pending> last_;  // a lane ends in order
  std::string why_not_;
  std::string last_error_;
  std::array<Count, 8> counts_;  // by Collective
};

}  // namespace offcore::shim
