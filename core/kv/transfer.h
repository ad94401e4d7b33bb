// Transfers of paged KV blocks between the caches of one GPU and host pools, by copy engines
// (DMA-Latte sections 2.1.2, 5.3 and 6).
//
// A call checks its blocks and slots, hands a job to a thread (transfer_worker.h) and returns. It
// is for one GPU: rank 0 of the backend it is given, which no other transfer uses.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/kv/adopt.h"
#include "core/kv/listed.h"
#include "core/kv/transfer_worker.h"

namespace offcore::kv {

struct TransferOptions {
  Pace pace;
  // Pages of so many bytes are copied one by one, by direction: see PageForms.
  std::array<std::optional<uint64_t>, 2> plain_from;
  bool checked = false;                      // verify every program before it is launched
  uint64_t link_bytes = uint64_t{32} << 20;  // of a neighbour's memory, at most
  uint64_t crossing_bytes = uint64_t{1}
                            << 30;  // of the host's, so that both engines copy small pages
  PackOptions packing;
  bool hold = false;  // TransferRequest::held of all jobs
  bool adopt = true;  // what lies in VMM memory is mapped once more where it folds better
  int64_t linger_ns = usual_linger_ns();  // of the thread, before it sleeps
  bool kernel = false;  // the backend copies by a kernel, for which more plain copies go together
};

class Transfer : public std::enable_shared_from_this<Transfer>, public OfProcess {
 public:
  // `neighbours`: backends of two ranks, rank 0 on the same GPU, rank 1 on one whose link is lent.
  // `keep` lives until the last copy has ended. Throws invalid, and what the backends throw.
  static std::shared_ptr<Transfer> create(std::shared_ptr<Backend> backend,
                                          std::vector<std::shared_ptr<Backend>> neighbours,
                                          std::vector<CacheGroup> groups, TransferOptions options,
                                          std::shared_ptr<const void> keep);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // One to be filled: its lists have the room of those of a job that has ended.
  TransferRequest request(Direction direction) const { return {queue_->spare.take(), direction}; }
  // Throws invalid for what the request names wrongly; nothing is copied then.
  std::shared_ptr<Job> start(TransferRequest request);
  // Job::wait and Job::enqueue_wait of a job of its own, and the thread's work until that is awake.
  // Throws unsupported for a stream that is being captured.
  void wait(Job& job, const Deadline& deadline) const;
  void enqueue_wait(Job& job, uint32_t layer, uintptr_t stream, const Deadline& deadline) const;
  // Job::enqueue_gate likewise.
  void enqueue_gate(Job& job, uint32_t layer, uintptr_t stream) const;
  // Ends the jobs under way (`cancel`: what of them is enqueued) and the thread. Throws timeout; no
  // job is taken afterwards all the same.
  void close(bool cancel, const Deadline& deadline);

  Backend& backend() const { return *backend_; }
  bool adopted() const { return adopted_ != nullptr; }

 private:
  // `adopted`: the memory of the one group's layout; null: it is its owner's.
  Transfer(std::shared_ptr<Backend> backend, std::vector<std::shared_ptr<Backend>> neighbours,
           std::vector<CacheGroup> groups, TransferOptions options,
           std::shared_ptr<const MappedAgain> adopted, std::shared_ptr<const void> keep);
  void begin();
  void check(const TransferRequest& request);
  Streams& streams_with(uintptr_t stream) const;
  template <typename Ended>
  void help(const Ended& ended, const Deadline& deadline) const;
  std::shared_ptr<const std::vector<LayerGroup>> layer_groups(uint32_t group,
                                                              uint32_t layers_together);

  const std::shared_ptr<Backend> backend_;
  const size_t links_;  // the own one included
  const std::vector<CacheGroup> groups_;
  const std::shared_ptr<const MappedAgain> adopted_;
  const TransferOptions options_;
  const std::shared_ptr<JobQueue> queue_;
  std::vector<std::vector<uint64_t>> memories_;  // by group, then tensor
  std::shared_ptr<TransferWorker> worker_;
  std::thread thread_;

  std::mutex mutex_;            // of all below
  std::vector<Listed> listed_;  // by group, then block
  std::map<std::pair<uint32_t, uint32_t>, std::shared_ptr<const std::vector<LayerGroup>>>
      layer_groups_;
};

}  // namespace offcore::kv
