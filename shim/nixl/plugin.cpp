// NIXL's backend OFFCORE: transfers of an agent within itself, between host memory and a GPU's or
// within a GPU, by copy engines (docs/nixl.md). All that is more than NIXL's interface is
// core/comm/copy_requests.h.
#include <algorithm>
#include <charconv>
#include <exception>
#include <iostream>

#include <backend/backend_plugin.h>
#include "core/backend/cuda/driver.h"
#include "core/base/env.h"
#include "core/comm/copy_requests.h"
#include "shim/machine_for.h"

namespace offcore::shim {
namespace {

constexpr const char* kName = "OFFCORE";
constexpr const char* kGpu = "gpu";  // parameter: see CopyRequests

nixl_status_t status_of(Code code) {
  switch (code) {
    case Code::invalid:
      return NIXL_ERR_INVALID_PARAM;
    case Code::unsupported:
      return NIXL_ERR_NOT_SUPPORTED;
    case Code::cancelled:
      return NIXL_ERR_CANCELED;
    default:
      return NIXL_ERR_BACKEND;
  }
}

void tell(const std::string& message) {
  std::cerr << cat("offcore: NIXL backend ", kName, ": ", message, '\n') << std::flush;
}

// NIXL knows a status; what the error says is for whoever reads the log.
template <typename Call>
nixl_status_t guarded(const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    tell(error.message());
    return status_of(error.code());
  } catch (const std::exception& error) {
    tell(error.what());
    return NIXL_ERR_BACKEND;
  }
}

int gpu_of(const nixl_b_params_t& params) {
  const auto given = params.find(kGpu);
  if (given == params.end() || given->second.empty()) return -1;
  const std::string& text = given->second;
  int gpu = -1;
  const char* const end = text.data() + text.size();
  const auto [stop, bad] = std::from_chars(text.data(), end, gpu);
  if (bad != std::errc() || stop != end || gpu < 0) {
    fail(Code::invalid, "parameter ", kGpu, " is '", text, "': give the number of a GPU");
  }
  return gpu;
}

std::shared_ptr<CopyRequests> open_requests(const nixl_b_params_t& params) {
  const int gpu = gpu_of(params);
  cuda::Driver::open();
  const Machine* const machine = machine_for(cuda::device_name(std::max(gpu, 0)), 1);
  const auto open = [machine](int device) {
    const CudaOptions options{.devices = {device}, .own_copy = "engine", .peers = {device}};
    return BatchExecutor::open("cuda", *machine, 1, {.cuda = options});
  };
  return owned_that_waits(std::make_unique<CopyRequests>(open, gpu));
}

Deadline deadline() { return Deadline::after_s(std::stod(env("OFFCORE_TIMEOUT_S"))); }

int home_of(nixl_mem_t kind, uint64_t device) {
  if (kind == VRAM_SEG) return static_cast<int>(device);
  if (kind != DRAM_SEG) fail(Code::unsupported, "memory other than DRAM and VRAM");
  return kHostMemory;
}

struct Memory final : nixlBackendMD {
  explicit Memory(std::shared_ptr<RegisteredMemory> registered)
      : nixlBackendMD(true), memory(std::move(registered)) {}
  const std::shared_ptr<RegisteredMemory> memory;
};

struct Handle final : nixlBackendReqH {
  explicit Handle(std::shared_ptr<CopyRequest> prepared) : request(std::move(prepared)) {}
  const std::shared_ptr<CopyRequest> request;
};

// One side of a transfer: its addresses, its home, and what they are registered as.
struct Side {
  std::vector<uint64_t> addresses;
  int home = kHostMemory;
};

Side side_of(const nixl_meta_dlist_t& list, std::vector<std::shared_ptr<RegisteredMemory>>& used) {
  Side side;
  side.addresses.reserve(static_cast<size_t>(list.descCount()));
  if (!list.isEmpty()) side.home = home_of(list.getType(), list[0].devId);
  const nixlBackendMD* last = nullptr;
  for (const nixlMetaDesc& one : list) {
    side.addresses.push_back(one.addr);
    if (home_of(list.getType(), one.devId) != side.home) {
      fail(Code::unsupported, "a list of memory on several GPUs: make a request for each");
    }
    if (one.metadataP == last) continue;
    last = one.metadataP;
    if (last == nullptr) fail(Code::invalid, "a descriptor of memory that is not registered");
    const auto& memory = static_cast<const Memory*>(last)->memory;
    if (std::find(used.begin(), used.end(), memory) == used.end()) used.push_back(memory);
  }
  return side;
}

class Engine final : public nixlBackendEngine {
 public:
  explicit Engine(const nixlBackendInitParams* params) : nixlBackendEngine(params) {
    const nixl_status_t status = guarded([&] {
      requests_ = open_requests(*params->customParams);
      return NIXL_SUCCESS;
    });
    initErr = status != NIXL_SUCCESS;
  }

  bool supportsRemote() const override { return false; }
  bool supportsLocal() const override { return true; }
  bool supportsNotif() const override { return false; }
  nixl_mem_list_t getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

  nixl_status_t registerMem(const nixlBlobDesc& memory, const nixl_mem_t& kind,
                            nixlBackendMD*& out) override {
    return guarded([&] {
      out = new Memory(requests_->add(memory.addr, memory.len, home_of(kind, memory.devId)));
      return NIXL_SUCCESS;
    });
  }
  nixl_status_t deregisterMem(nixlBackendMD* memory) override {
    const std::unique_ptr<Memory> own(static_cast<Memory*>(memory));
    return guarded([&] {
      requests_->remove(*own->memory, deadline());
      return NIXL_SUCCESS;
    });
  }
  nixl_status_t loadLocalMD(nixlBackendMD* memory, nixlBackendMD*& out) override {
    out = memory;
    return NIXL_SUCCESS;
  }
  nixl_status_t unloadMD(nixlBackendMD*) override { return NIXL_SUCCESS; }
  nixl_status_t connect(const std::string& agent) override { return own(agent); }
  nixl_status_t disconnect(const std::string& agent) override { return own(agent); }

  nixl_status_t prepXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local,
                         const nixl_meta_dlist_t& remote, const std::string& agent,
                         nixlBackendReqH*& handle, const nixl_opt_b_args_t*) const override {
    if (own(agent) != NIXL_SUCCESS) return own(agent);
    return guarded([&] {
      const bool reads = operation == NIXL_READ;
      RequestedCopies copies;
      Side dst = side_of(reads ? local : remote, copies.memories);
      Side src = side_of(reads ? remote : local, copies.memories);
      copies.dsts = std::move(dst.addresses);
      copies.srcs = std::move(src.addresses);
      copies.dst_home = dst.home;
      copies.src_home = src.home;
      for (const nixlMetaDesc& one : local) copies.sizes.push_back(one.len);
      handle = new Handle(requests_->prepare(std::move(copies)));
      return NIXL_SUCCESS;
    });
  }
  nixl_status_t postXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                         const std::string&, nixlBackendReqH*& handle,
                         const nixl_opt_b_args_t*) const override {
    if (handle == nullptr) return NIXL_ERR_INVALID_PARAM;
    return guarded([&] {
      requests_->post(request_of(handle));
      return NIXL_IN_PROG;
    });
  }
  nixl_status_t checkXfer(nixlBackendReqH* handle) const override {
    return guarded(
        [&] { return requests_->done(request_of(handle)) ? NIXL_SUCCESS : NIXL_IN_PROG; });
  }
  // A request that does not end in time stays as it is, and NIXL may release it again.
  nixl_status_t releaseReqH(nixlBackendReqH* handle) const override {
    return guarded([&] {
      requests_->cancel(request_of(handle), deadline());
      delete handle;
      return NIXL_SUCCESS;
    });
  }

 private:
  static CopyRequest& request_of(nixlBackendReqH* handle) {
    return *static_cast<Handle*>(handle)->request;
  }
  nixl_status_t own(const std::string& agent) const {
    return agent == localAgent ? NIXL_SUCCESS : NIXL_ERR_NOT_SUPPORTED;
  }

  std::shared_ptr<CopyRequests> requests_;
};

}  // namespace
}  // namespace offcore::shim

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin* nixl_plugin_init() {
  using offcore::shim::Engine;
  return nixlBackendPluginCreator<Engine>::create(NIXL_PLUGIN_API_VERSION, offcore::shim::kName,
                                                  OFFCORE_VERSION, {{offcore::shim::kGpu, ""}},
                                                  {DRAM_SEG, VRAM_SEG});
}

extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}
