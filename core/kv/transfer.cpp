#include "core/kv/transfer.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "core/base/threads.h"

namespace offcore::kv {
namespace {

constexpr double kEndS = 10;
// A link copies more for a millisecond and longer: what the thread takes to wake is little of that,
// and what a caller would enqueue meanwhile is much of its call.
constexpr uint64_t kBeginsWithCaller = uint64_t{64} << 20;

// A caller that submits while it waits.
class WaitingCaller {
 public:
  explicit WaitingCaller(JobQueue& queue) : queue_(queue) { ++queue_.helpers; }
  ~WaitingCaller() {
    const std::scoped_lock lock(queue_.mutex);
    --queue_.helpers;  // the worker goes on: there is something to see end
    queue_.news = true;
    queue_.work.notify_one();
  }
  WaitingCaller(const WaitingCaller&) = delete;
  WaitingCaller& operator=(const WaitingCaller&) = delete;

 private:
  JobQueue& queue_;
};

// Where each tensor lies. Layers in allocations of their own may be at equal steps by chance, and
// the driver refuses a strided copy into them.
std::vector<uint64_t> memories_of(Backend& backend, const Layout& layout) {
  GpuRanks* gpus = backend.capabilities().gpus;
  std::vector<uint64_t> memories;
  for (const MemoryExtent& extent : layout.extents()) {
    memories.push_back(gpus == nullptr ? 0 : gpus->memory_of(extent.first, extent.last));
  }
  return memories;
}

void check_reach(Backend& neighbour, const Layout& layout) {
  GpuRanks* gpus = neighbour.capabilities().gpus;
  if (gpus == nullptr) return;
  for (const MemoryExtent& extent : layout.extents()) {
    if (gpus->reaches(kNeighbour, extent.first, extent.last)) continue;
    fail(Code::unsupported, "GPU ", gpus->device(kNeighbour), " does not reach the cache, ",
         "whose memory was mapped for its own GPU only (torch: expandable segments): allocate it ",
         "otherwise, or leave that link out");
  }
}

// The room on neighbours that rows take on their way: a quarter for each lane of a direction.
std::vector<Neighbour> lent_by(const std::vector<std::shared_ptr<Backend>>& backends,
                               const std::vector<CacheGroup>& groups, uint64_t bytes) {
  std::vector<Neighbour> neighbours;
  for (const std::shared_ptr<Backend>& backend : backends) {
    for (const CacheGroup& group : groups) {
      check_reach(*backend, *group.layout);
      const uint64_t block_bytes = group.layout->block_bytes();
      if (group.layout->row_blocks() > 1) {
        fail(Code::unsupported, "links cannot be combined with row_blocks: blocks cross the links ",
             "of other GPUs as whole rows");
      }
      if (block_bytes <= bytes / 4) continue;
      fail(Code::invalid, "a block of ", block_bytes, " bytes needs links of at least ",
           4 * block_bytes, " bytes of a neighbour's memory, not ", bytes);
    }
    neighbours.push_back({backend, backend->allocate(kNeighbour, bytes)});
  }
  return neighbours;
}

void check_pool(const CacheGroup& group) {
  const Layout& layout = *group.layout;
  if (layout.row_bytes() == group.pool->row_bytes()) return;
  if (layout.row_blocks() == 1) {
    fail(Code::invalid, "a block of the cache has ", layout.block_bytes(),
         " bytes, one of the host pool ", group.pool->row_bytes());
  }
  fail(Code::invalid, layout.row_blocks(), " blocks of the cache have ", layout.row_bytes(),
       " bytes, a row of the host pool ", group.pool->row_bytes());
}

// A slot is to be the same bytes for all groups of its pool.
void check_shared(const CacheGroup& group, const CacheGroup& other) {
  const RowPlaces places = group.places();
  const RowPlaces others = other.places();
  if (group.pool != other.pool) return;
  if (places.blocks == others.blocks && places.step == others.step) return;
  fail(Code::invalid,
       "two groups share a host pool, but not how blocks lie in its rows: ", "row_blocks ",
       places.blocks, " and ", others.blocks, ", pages of ", places.step, " and ", others.step,
       " bytes");
}

}  // namespace

std::shared_ptr<Transfer> Transfer::create(std::shared_ptr<Backend> backend,
                                           std::vector<std::shared_ptr<Backend>> neighbours,
                                           std::vector<CacheGroup> groups, TransferOptions options,
                                           std::shared_ptr<const void> keep) {
  std::shared_ptr<const MappedAgain> memory;
  // Groups may share memory, which their addresses tell; neighbours reach what is not mapped.
  if (options.adopt && groups.size() == 1 && neighbours.empty()) {
    const Layout& own = *groups[0].layout;
    AdoptedCache cache = adopt(*backend, own, memories_of(*backend, own));
    if (cache.layout != nullptr) {
      groups[0].layout = std::move(cache.layout);
      memory = std::move(cache.memory);
      using Kept = std::pair<std::shared_ptr<const void>, std::shared_ptr<const MappedAgain>>;
      keep = std::make_shared<const Kept>(std::move(keep), memory);
    }
  }
  std::unique_ptr<Transfer> transfer(new Transfer(std::move(backend), std::move(neighbours),
                                                  std::move(groups), options, std::move(memory),
                                                  std::move(keep)));
  transfer->begin();
  return owned_that_waits(std::move(transfer));
}

Transfer::Transfer(std::shared_ptr<Backend> backend,
                   std::vector<std::shared_ptr<Backend>> neighbours, std::vector<CacheGroup> groups,
                   TransferOptions options, std::shared_ptr<const MappedAgain> adopted,
                   std::shared_ptr<const void> keep)
    : OfProcess("the transfer"),
      backend_(std::move(backend)),
      links_(1 + neighbours.size()),
      groups_(std::move(groups)),
      adopted_(std::move(adopted)),
      options_(options),
      queue_(std::make_shared<JobQueue>(options.linger_ns)),
      listed_(groups_.size()) {
  if (groups_.empty()) fail(Code::invalid, "a transfer needs a cache and a pool");
  for (size_t i = 0; i < groups_.size(); ++i) {
    const CacheGroup& group = groups_[i];
    check_pool(group);
    for (size_t other = 0; other < i; ++other) check_shared(group, groups_[other]);
    listed_[i].hold(group.layout->blocks());
    memories_.push_back(memories_of(*backend_, *group.layout));
  }
  // Where pages are to go one by one, by a kernel or over other links nothing else is to decide.
  const bool straight =
      options_.plain_from[0] || options_.plain_from[1] || options_.kernel || !neighbours.empty();
  if (straight && options_.packing.policy == Policy::pack) {
    fail(Code::invalid, "policy pack cannot be combined with a kernel, plain_from or links");
  }
  Packing packing;
  EngineSplit crossing;
  if (!straight) {
    packing = packing_of(*backend_, groups_, memories_, options_.packing);
    if (!packing.always) {
      crossing = crossing_of(*backend_, groups_, memories_, options_.crossing_bytes);
    }
  }
  worker_ = std::make_shared<TransferWorker>(queue_, backend_, groups_, std::move(crossing),
                                             std::move(packing),
                                             lent_by(neighbours, groups_, options_.link_bytes),
                                             options_.pace, std::move(keep), options_.checked);
}

void Transfer::begin() {
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([worker = worker_] { worker->run(); });
  } catch (const std::system_error& error) {
    fail(Code::driver, "cannot start the thread of a transfer: ", error.what());
  }
}

Transfer::~Transfer() {
  if (!thread_.joinable()) return;
  try {
    close(true, Deadline::after_s(kEndS));
  } catch (const Error&) {
    thread_.detach();  // a GPU does not end: the thread keeps what its copies need
  }
}

void Transfer::check(const TransferRequest& request) {
  const uint64_t blocks = groups_[request.group].layout->blocks();
  for (int64_t block : request.blocks) {
    if (block < 0 || static_cast<uint64_t>(block) >= blocks) {
      fail(Code::invalid, "block ", block, " is not one of the cache's ", blocks);
    }
  }
  if (request.direction == Direction::store) return;
  if (const std::optional<int64_t> block = listed_[request.group].twice(request.blocks)) {
    fail(Code::invalid, "block ", *block, " is listed twice: a load would write it twice");
  }
}

std::shared_ptr<const std::vector<LayerGroup>> Transfer::layer_groups(uint32_t group,
                                                                      uint32_t layers_together) {
  auto& layer_groups = layer_groups_[{group, layers_together}];
  if (layer_groups == nullptr) {
    layer_groups = std::make_shared<const std::vector<LayerGroup>>(
        layer_groups_of(*groups_[group].layout, layers_together, memories_[group]));
  }
  return layer_groups;
}

std::shared_ptr<Job> Transfer::start(TransferRequest request) {
  if (request.group >= groups_.size()) {
    fail(Code::invalid, "there is no group ", request.group, " of ", groups_.size());
  }
  if (request.blocks.size() != request.slots.size()) {
    fail(Code::invalid, request.blocks.size(), " blocks and ", request.slots.size(),
         " slots: each block needs its slot");
  }
  if (adopted_ != nullptr && !adopted_->intact()) {
    fail(Code::invalid, "the cache's memory was unmapped, or other memory was mapped there, since ",
         "the transfer was made: close it and make another");
  }
  request.held = options_.hold;
  const CacheGroup& group = groups_[request.group];
  const uint32_t layers = group.layout->layers();
  const uint64_t bytes = request.blocks.size() * group.layout->block_bytes();
  const bool load = request.direction == Direction::load;
  const PageForms forms(backend_->machine(), !backend_->host_visible() && !options_.kernel,
                        options_.plain_from[static_cast<size_t>(request.direction)]);
  const std::shared_ptr<Job> job =
      owned_by_process(std::make_unique<Job>(queue_, std::move(request)));
  job->layers_ = layers;
  const uint32_t together = job->request_.layers_together;
  job->together_ = together == 0 ? layers : std::min(together, layers);
  job->called_ns_ = backend_->now_ns();
  std::shared_ptr<const std::vector<LayerGroup>> layer_groups;
  {
    const std::scoped_lock lock(mutex_);
    check(job->request_);
    layer_groups = this->layer_groups(job->request_.group, job->together_);
  }
  job->layer_groups_.resize(layer_groups->size());
  job->gates_.resize(layer_groups->size());
  job->layer_groups_ahead_.resize(layer_groups->size());
  job->report_.link_bytes.resize(links_);
  TransferRequest& named = job->request_;
  group.pool->pin(named.slots, !load, group.places(), named.rows);
  try {
    job->builder_.emplace(named.direction, forms, group.layout, std::move(layer_groups),
                          named.blocks, named.rows, group.pool->seams());
    const std::scoped_lock lock(queue_->mutex);
    if (queue_->closing) fail(Code::cancelled, "the transfer is closed");
    queue_->inbox.push_back(job);
    ++queue_->under_way;
    queue_->news = true;
  } catch (...) {
    group.pool->unpin(named.slots, group.places());
    throw;
  }
  queue_->work.notify_one();  // without the mutex, which who wakes takes first
  if (queue_->asleep && bytes <= kBeginsWithCaller) worker_->help(false);
  return job;
}

template <typename Ended>
void Transfer::help(const Ended& ended, const Deadline& deadline) const {
  const WaitingCaller caller(*queue_);
  int64_t submitted_ns = now_ns();
  while (!ended() && !deadline.passed()) {
    if (worker_->help(true)) {
      submitted_ns = now_ns();
    } else if (now_ns() - submitted_ns > queue_->spin_ns) {
      break;  // it waits for others: the worker looks after that
    } else {
      sched_yield();
    }
    deadline.listen();
  }
}

void Transfer::wait(Job& job, const Deadline& deadline) const {
  help([&] { return job.done(); }, deadline);
  job.wait(deadline);
}

Streams& Transfer::streams_with(uintptr_t stream) const {
  Streams* streams = backend_->capabilities().streams;
  if (streams == nullptr) fail(Code::unsupported, "this backend has no streams that can wait");
  if (backend_->capture_of({&stream, 1}) != 0) {
    fail(Code::unsupported,
         "the stream is being captured, and a graph cannot wait for a transfer: ",
         "call it outside");
  }
  return *streams;
}

void Transfer::enqueue_wait(Job& job, uint32_t layer, uintptr_t stream,
                            const Deadline& deadline) const {
  Streams& streams = streams_with(stream);
  job.want(layer);
  help([&] { return job.enqueued(layer); }, deadline);
  job.enqueue_wait(layer, streams, stream, deadline);
}

// A held job stands in an engine's queue until what it comes after has passed, which may stand
// before a gate of a job behind it.
void Transfer::enqueue_gate(Job& job, uint32_t layer, uintptr_t stream) const {
  if (options_.hold) {
    fail(Code::invalid, "gate cannot be combined with hold, by which engines wait: leave one out");
  }
  Streams& streams = streams_with(stream);
  job.want(layer);
  job.enqueue_gate(layer, streams, stream);
}

void Transfer::close(bool cancel, const Deadline& deadline) {
  if (!here()) return;
  std::unique_lock lock(queue_->mutex);
  queue_->closing = true;
  queue_->cancel_all = queue_->cancel_all || cancel;
  queue_->news = true;
  queue_->work.notify_one();
  if (!sleep_until(queue_->changed, lock, deadline, [&] { return queue_->ended; })) {
    fail(Code::timeout, queue_->under_way, " jobs were still under way after ",
         shown_s(deadline.wait_ns()), " s");
  }
  lock.unlock();
  const std::scoped_lock joining(mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace offcore::kv
