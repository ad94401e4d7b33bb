// Entry points for streams, events, stream memory operations and capture.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/transfer.h"

namespace fakecuda {
namespace {

void check_mem_op(const MemOp& op, const Stream& stream) {
  if (op.operation == kOpBarrier) return require(op.address <= 1, kInvalidValue);  // its flags
  const bool write = op.operation == kOpWrite32 || op.operation == kOpWrite64;
  require(op.operation == kOpWait32 || op.operation == kOpWait64 || write, kNotSupported);
  const unsigned bytes = op.operation == kOpWrite64 || op.operation == kOpWait64 ? 8 : 4;
  if (write) {
    require(op.flags != kWriteNoBarrier, kNotSupported);
    require(op.flags == kWriteDefault, kInvalidValue);
  } else {
    require(!(op.flags & kWaitFlush), kNotSupported);
    require(op.flags <= kWaitNor, kInvalidValue);
  }
  require(op.address % bytes == 0, kInvalidValue);
  const int device = stream.context()->physical;
  require(addresses().reachable(op.address, bytes, device, write), kInvalidValue);
}

void push_mem_ops(StreamHandle handle, std::vector<MemOp> ops) {
  const auto stream = stream_of(handle);
  for (const MemOp& op : ops) check_mem_op(op, *stream);
  stream->push(mem_op_work(std::move(ops)));
}

// What the event's last record has come to: null, or the marker. Fails if it was captured.
std::shared_ptr<Marker> settled_marker(Event& event) {
  const std::lock_guard lock(event.mutex);
  require(!event.capture, kCapturedEvent);
  return event.marker;
}

void capture_status(StreamHandle handle, int* status, uint64_t* id, GraphHandle* graph = nullptr) {
  require(status != nullptr, kInvalidValue);
  const auto stream = stream_of(handle);
  if (stream->is_legacy()) require(!blocking_capture(*stream), kCaptureImplicit);
  const std::lock_guard lock(capture_mutex());
  const auto& capture = stream->capturing.capture;
  *status = !capture                 ? kCaptureNone
            : capture->invalidated() ? kCaptureStatusInvalidated
                                     : kCaptureActive;
  if (id != nullptr) *id = capture ? capture->id() : 0;
  if (graph != nullptr) *graph = capture && !capture->invalidated() ? capture->graph() : nullptr;
}

void check_stream_error(const Stream& stream) { check_alive(*stream.context()); }

}  // namespace

FAKE_API Result cuStreamCreateWithPriority(StreamHandle* out, unsigned flags, int priority) {
  (void)priority;  // outside the range it is clamped; copy engines ignore it
  return enter("cuStreamCreateWithPriority", [&] {
    const auto context = current_context();
    require(out != nullptr && flags <= kStreamNonBlocking, kInvalidValue);
    auto stream = (flags & kStreamNonBlocking) != 0
                      ? std::make_shared<Stream>(context, flags, false)
                      : blocking_stream(context);
    {
      const std::lock_guard lock(context->mutex);
      std::erase_if(context->every, [](const auto& other) { return other.expired(); });
      context->every.push_back(stream);
    }
    *out = streams().add(std::move(stream));
  });
}

FAKE_API Result cuStreamDestroy_v2(StreamHandle handle) {
  return enter("cuStreamDestroy", [&] {
    const auto context = any_current_context();
    require(reinterpret_cast<uint64_t>(handle) > 2, kInvalidHandle);
    const auto stream = streams().find(handle);
    refuse_in_capture(*stream);
    refuse_unsafe();
    streams().remove(handle);
    stream->close();
    check_alive(*context);
  });
}

FAKE_API Result cuStreamSynchronize(StreamHandle handle) {
  return enter("cuStreamSynchronize", [&] {
    const auto stream = stream_of(handle);
    refuse_in_capture(*stream);
    refuse_unsafe();
    stream->synchronize();
    check_stream_error(*stream);
  });
}

FAKE_API Result cuStreamQuery(StreamHandle handle) {
  return enter("cuStreamQuery", [&] {
    const auto stream = stream_of(handle);
    refuse_in_capture(*stream);
    refuse_unsafe();
    require(stream->idle(), kNotReady);
    check_stream_error(*stream);
  });
}

FAKE_API Result cuStreamGetCtx(StreamHandle handle, ContextHandle* context) {
  return enter("cuStreamGetCtx", [&] {
    require(context != nullptr, kInvalidValue);
    *context = stream_of(handle)->context()->handle;
  });
}

FAKE_API Result cuStreamGetCtx_v2(StreamHandle handle, ContextHandle* context, void** green) {
  return enter("cuStreamGetCtx", [&] {
    require(context != nullptr && green != nullptr, kInvalidValue);
    *green = nullptr;
    *context = stream_of(handle)->context()->handle;
  });
}

FAKE_API Result cuStreamIsCapturing(StreamHandle handle, int* status) {
  return enter("cuStreamIsCapturing", [&] { capture_status(handle, status, nullptr); });
}

FAKE_API Result cuStreamGetCaptureInfo(StreamHandle handle, int* status, uint64_t* id) {
  return enter("cuStreamGetCaptureInfo", [&] { capture_status(handle, status, id); });
}

// What the next node would wait for cannot be asked of the stand-in.
FAKE_API Result cuStreamGetCaptureInfo_v2(StreamHandle handle, int* status, uint64_t* id,
                                          GraphHandle* graph, void** nodes, size_t* count) {
  return enter("cuStreamGetCaptureInfo", [&] {
    require(nodes == nullptr && count == nullptr, kNotSupported);
    capture_status(handle, status, id, graph);
  });
}

FAKE_API Result cuStreamGetCaptureInfo_v3(StreamHandle handle, int* status, uint64_t* id,
                                          GraphHandle* graph, void** nodes, void** edges,
                                          size_t* count) {
  return enter("cuStreamGetCaptureInfo", [&] {
    require(nodes == nullptr && edges == nullptr && count == nullptr, kNotSupported);
    capture_status(handle, status, id, graph);
  });
}

FAKE_API Result cuThreadExchangeStreamCaptureMode(int* mode) {
  return enter("cuThreadExchangeStreamCaptureMode", [&] {
    require(mode != nullptr && *mode >= kCaptureGlobal && *mode <= kCaptureRelaxed, kInvalidValue);
    *mode = exchange_mode(*mode);
  });
}

FAKE_API Result cuStreamWaitEvent(StreamHandle handle, EventHandle event_handle, unsigned flags) {
  return enter("cuStreamWaitEvent", [&] {
    require(flags == 0, kInvalidValue);
    const auto stream = stream_of(handle);
    const auto event = events().find(event_handle);
    std::shared_ptr<Marker> marker;
    {
      const std::lock_guard lock(capture_mutex());
      const std::lock_guard event_lock(event->mutex);
      if (event->capture) {
        require(event->capture->active(), kCapturedEvent);
        return event->capture->join(*stream, *event);
      }
      marker = event->marker;
      if (const auto& capture = stream->capturing.capture; capture && marker) {
        capture->invalidate();
        throw Failure{kCaptureIsolation};
      }
    }
    if (!marker) return;
    stream->push([marker](Engine&) {
      marker->wait();
      return kSuccess;
    });
  });
}

FAKE_API Result cuStreamWaitValue32_v2(StreamHandle stream, DevicePtr address, uint32_t value,
                                       unsigned flags) {
  return enter("cuStreamWaitValue32",
               [&] { push_mem_ops(stream, {{kOpWait32, address, value, flags, 0, 0}}); });
}

FAKE_API Result cuStreamWriteValue32_v2(StreamHandle stream, DevicePtr address, uint32_t value,
                                        unsigned flags) {
  return enter("cuStreamWriteValue32",
               [&] { push_mem_ops(stream, {{kOpWrite32, address, value, flags, 0, 0}}); });
}

FAKE_API Result cuStreamBatchMemOp_v2(StreamHandle stream, unsigned count, const MemOp* ops,
                                      unsigned flags) {
  return enter("cuStreamBatchMemOp", [&] {
    require(flags == 0 && count > 0 && count < 256 && ops != nullptr, kInvalidValue);
    push_mem_ops(stream, std::vector<MemOp>(ops, ops + count));
  });
}

FAKE_API Result cuEventCreate(EventHandle* out, unsigned flags) {
  return enter("cuEventCreate", [&] {
    auto event = std::make_shared<Event>();
    event->context = current_context();
    event->flags = flags;
    require(out != nullptr && flags < 8, kInvalidValue);
    require(!(flags & kEventInterprocess), kNotSupported);
    *out = events().add(std::move(event));
  });
}

FAKE_API Result cuEventDestroy_v2(EventHandle handle) {
  return enter("cuEventDestroy", [&] {
    const auto context = any_current_context();
    events().remove(handle);
    check_alive(*context);
  });
}

// The driver (580) reads what a stream that is gone has left behind, now and then to its end.
FAKE_API Result cuEventRecord(EventHandle handle, StreamHandle stream_handle) {
  return enter("cuEventRecord", [&] {
    const auto event = events().find(handle);
    if (streams().gone(stream_handle)) {
      std::fputs("cuEventRecord: the stream is gone\n", stderr);
      std::abort();
    }
    const auto stream = stream_of(stream_handle);
    require(event->context == stream->context(), kInvalidHandle);
    {
      const std::lock_guard lock(capture_mutex());
      if (const auto capture = stream->capturing.capture) return capture->record(*stream, *event);
    }
    auto marker = stream->mark();
    const std::lock_guard lock(event->mutex);
    event->marker = std::move(marker);
    event->capture = nullptr;
  });
}

FAKE_API Result cuCtxRecordEvent(ContextHandle handle, EventHandle event_handle) {
  return enter("cuCtxRecordEvent", [&] {
    const auto event = events().find(event_handle);
    require(event->context->handle == handle, kInvalidHandle);
    auto marker = mark_of_context(event->context);
    const std::lock_guard lock(event->mutex);
    event->marker = std::move(marker);
    event->capture = nullptr;
  });
}

FAKE_API Result cuCtxSynchronize() {
  return enter("cuCtxSynchronize", [&] {
    const auto context = current_context();
    mark_of_context(context)->wait();
    check_alive(*context);
  });
}

FAKE_API Result cuEventQuery(EventHandle handle) {
  return enter("cuEventQuery", [&] {
    const auto event = events().find(handle);
    const auto marker = settled_marker(*event);
    refuse_unsafe();
    require(!marker || marker->is_passed(), kNotReady);
    check_alive(*event->context);
  });
}

FAKE_API Result cuEventSynchronize(EventHandle handle) {
  return enter("cuEventSynchronize", [&] {
    current_context();
    const auto event = events().find(handle);
    const auto marker = settled_marker(*event);
    refuse_unsafe();
    if (marker) marker->wait();
    check_alive(*event->context);
  });
}

FAKE_API Result cuEventElapsedTime(float* ms, EventHandle start, EventHandle end) {
  return enter("cuEventElapsedTime", [&] {
    current_context();
    require(ms != nullptr, kInvalidValue);
    const auto first = events().find(start), second = events().find(end);
    require(first->context == second->context, kInvalidHandle);
    require(!((first->flags | second->flags) & kEventDisableTiming), kInvalidHandle);
    const auto from = settled_marker(*first), until = settled_marker(*second);
    require(from && until, kInvalidHandle);
    require(from->is_passed() && until->is_passed(), kNotReady);
    *ms = static_cast<float>(until->time_ns - from->time_ns) * 1e-6f;
  });
}

FAKE_API Result cuEventElapsedTime_v2(float* ms, EventHandle start, EventHandle end) {
  return cuEventElapsedTime(ms, start, end);
}

FAKE_API Result cuStreamBeginCapture_v2(StreamHandle handle, int mode) {
  return enter("cuStreamBeginCapture", [&] {
    require(mode >= kCaptureGlobal && mode <= kCaptureRelaxed, kInvalidValue);
    const auto stream = stream_of(handle);
    const std::lock_guard lock(capture_mutex());
    Capture::begin(*stream, mode);
  });
}

FAKE_API Result cuStreamEndCapture(StreamHandle handle, GraphHandle* graph) {
  return enter("cuStreamEndCapture", [&] {
    require(graph != nullptr, kInvalidValue);
    *graph = nullptr;
    const auto stream = stream_of(handle);
    const std::lock_guard lock(capture_mutex());
    *graph = Capture::end(*stream);
  });
}

}  // namespace fakecuda
