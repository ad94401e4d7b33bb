#include "tests/fakes/cuda/stream.h"

#include <sys/prctl.h>

#include <chrono>
#include <utility>

#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/settings.h"

namespace fakecuda {

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Marker::pass() {
  time_ns = now_ns();
  {
    const Shown shown;
    passed_ = 1;
  }
  passed_.notify_all();
}

void Marker::wait() const {
  passed_.wait(0);
  is_passed();
}

bool Marker::is_passed() const {
  const Shown shown;
  return passed_ != 0;
}

void Engine::pause() {
  if (settings().seed == 0) return;
  const uint64_t draw = random();
  if (draw % 8 != 0) return;
  const uint64_t most_us = draw % 64 == 0 ? 1000 : 200;  // longer than a thread takes to wake
  std::this_thread::sleep_for(std::chrono::microseconds((draw >> 8) % most_us));
}

Result Engine::catch_up() {
  for (const auto& rest : std::exchange(left, {})) {
    if (const Result code = rest()) return code;
  }
  return kSuccess;
}

Stream::Stream(std::shared_ptr<Context> context, unsigned flags, bool legacy)
    : context_(std::move(context)), flags_(flags), legacy_(legacy) {
  static std::atomic<uint64_t> made{0};
  random_.seed(settings().seed * 0x9e37'79b9'7f4a'7c15 + made++);
}

void Stream::push(Work work) {
  if (legacy_) refuse_in_capture(*this);
  {
    const std::lock_guard lock(capture_mutex());
    if (capturing.capture) return capturing.capture->add(*this, std::move(work));
  }
  order_against_default_stream();
  enqueue({std::move(work), nullptr});
}

std::shared_ptr<Marker> Stream::mark() {
  auto marker = std::make_shared<Marker>();
  order_against_default_stream();
  enqueue({nullptr, marker});
  return marker;
}

// Work of the default stream waits for all earlier work of the context's blocking streams, and
// theirs for its.
void Stream::order_against_default_stream() {
  if (flags_ & kStreamNonBlocking) return;
  std::vector<std::shared_ptr<Stream>> before;
  if (!legacy_) {
    before.push_back(context_->default_stream());
  } else {
    const std::lock_guard lock(context_->mutex);
    for (const auto& other : context_->blocking) {
      if (auto stream = other.lock()) before.push_back(std::move(stream));
    }
  }
  for (const auto& stream : before) {
    if (!stream || stream->idle()) continue;
    auto marker = std::make_shared<Marker>();
    stream->enqueue({nullptr, marker});
    enqueue({[marker](Engine&) {
               marker->wait();
               return kSuccess;
             },
             nullptr});
  }
}

void Stream::enqueue(Entry entry) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.size() < settings().queue_depth; });
  require(!closed_, kContextIsDestroyed);
  queue_.push_back(std::move(entry));
  pass_on(&queue_.back());
  if (!started_) {
    started_ = true;
    std::thread([self = shared_from_this()]() mutable {
      const Hidden hidden;  // to the end of the stream
      std::exchange(self, nullptr)->serve();
    }).detach();
  }
  changed_.notify_all();
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  if (!queue_.empty()) return false;
  take_over(this);
  return true;
}

bool Stream::closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::serve() {
  prctl(PR_SET_TIMERSLACK, 1000);
  Engine engine{*context_, random_, settings().loose};
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    take_over(&queue_.front());
    lock.unlock();
    if (entry.work && context_->error == kSuccess) {
      if (const Result code = entry.work(engine)) context_->fail(code);
    }
    lock.lock();
    if (entry.marker || queue_.size() == 1) {  // who waits for the stream waits for all of it
      lock.unlock();
      if (const Result code = engine.catch_up()) context_->fail(code);
      lock.lock();
    }
    entry.work = nullptr;
    pass_on(this);
    queue_.pop_front();
    if (entry.marker) entry.marker->pass();
    changed_.notify_all();
  }
}

std::mutex& capture_mutex() {
  static std::mutex* const value = new std::mutex;
  return *value;
}

Registry<Context, ContextHandle>& contexts() {
  static auto* const value = new Registry<Context, ContextHandle>(1, kInvalidContext);
  return *value;
}

Registry<Stream, StreamHandle>& streams() {
  static auto* const value = new Registry<Stream, StreamHandle>(2, kInvalidHandle);
  return *value;
}

Registry<Event, EventHandle>& events() {
  static auto* const value = new Registry<Event, EventHandle>(3, kInvalidHandle);
  return *value;
}

std::shared_ptr<Marker> mark_of_context(const std::shared_ptr<Context>& context) {
  std::vector<std::shared_ptr<Stream>> every{context->default_stream()};
  {
    const std::lock_guard lock(context->mutex);
    for (const auto& other : context->every) {
      if (auto stream = other.lock()) every.push_back(std::move(stream));
    }
    for (const auto& [thread, stream] : context->of_threads) every.push_back(stream);
  }
  bool captures = false;
  {
    const std::lock_guard lock(capture_mutex());
    for (const auto& stream : every) {
      const auto& capture = stream->capturing.capture;
      if (capture == nullptr) continue;
      capture->invalidate();
      captures = true;
    }
  }
  require(!captures, kCaptureUnsupported);
  std::vector<std::shared_ptr<Marker>> markers;
  std::vector<std::shared_ptr<Stream>> closed;
  for (const auto& stream : every) {
    if (stream->closed()) {
      closed.push_back(stream);
    } else {
      markers.push_back(stream->mark());
    }
  }
  const auto all = std::make_shared<Stream>(context, kStreamNonBlocking, false);
  all->push([markers, closed](Engine&) {
    for (const auto& marker : markers) marker->wait();
    for (const auto& stream : closed) {
      while (!stream->idle()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return kSuccess;
  });
  auto marker = all->mark();
  all->close();
  return marker;
}

void check_alive(const Context& context) {
  if (const Result error = context.error) throw Failure{error};
}

std::shared_ptr<Stream> blocking_stream(const std::shared_ptr<Context>& context) {
  auto stream = std::make_shared<Stream>(context, 0, false);
  const std::lock_guard lock(context->mutex);
  std::erase_if(context->blocking, [](const auto& other) { return other.expired(); });
  context->blocking.push_back(stream);
  return stream;
}

// A thread's number may come again: then a new thread has the stream of one that has ended.
static std::shared_ptr<Stream> stream_of_thread() {
  const auto context = current_context();
  {
    const std::lock_guard lock(context->mutex);
    const auto found = context->of_threads.find(std::this_thread::get_id());
    if (found != context->of_threads.end()) return found->second;
  }
  auto stream = blocking_stream(context);
  const std::lock_guard lock(context->mutex);
  return context->of_threads[std::this_thread::get_id()] = std::move(stream);
}

std::shared_ptr<Stream> stream_of(StreamHandle handle) {
  const auto number = reinterpret_cast<uint64_t>(handle);
  if (number <= 1) return current_context()->default_stream();
  if (number == 2) return stream_of_thread();
  current_context();
  auto stream = streams().find(handle);
  check_alive(*stream->context());
  return stream;
}

}  // namespace fakecuda
