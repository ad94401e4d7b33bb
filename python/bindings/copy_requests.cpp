// Copies that are prepared once and posted many times, as transfer libraries' plugins do.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "core/comm/copy_requests.h"
#include "module.h"
#include "process.h"
#include "released.h"

namespace offcore {

void bind_copy_requests(nb::module_& module) {
  nb::class_<RegisteredMemory>(module, "RegisteredMemory");
  nb::class_<CopyRequest>(module, "CopyRequest").def_prop_ro("plan", [](const CopyRequest& self) {
    return self.planned.plan;
  });
  nb::class_<CopyRequests>(module, "CopyRequests", "See core/comm/copy_requests.h.")
      .def(nb::new_([](const Machine& machine, int gpu) {
             const auto open = [machine](int device) {
               const CudaOptions options{
                   .devices = {device}, .own_copy = "engine", .peers = {device}};
               return BatchExecutor::open("cuda", machine, 1, {.cuda = options});
             };
             return owned_that_waits(std::make_unique<CopyRequests>(open, gpu));
           }),
           nb::arg("machine"), nb::arg("gpu") = -1)
      .def("add", &CopyRequests::add, nb::arg("address"), nb::arg("bytes"), nb::arg("home"),
           Unlocked(), "home: a GPU, or -1: the host.")
      .def(
          "remove",
          [](CopyRequests& self, RegisteredMemory& memory, double timeout_s) {
            LockReleased released;
            self.remove(memory, released.within(timeout_s));
          },
          nb::arg("memory"), nb::arg("timeout_s"))
      .def(
          "prepare",
          [](CopyRequests& self, std::vector<uint64_t> dsts, std::vector<uint64_t> srcs,
             std::vector<uint64_t> sizes, int dst_home, int src_home,
             std::vector<std::shared_ptr<RegisteredMemory>> memories) {
            LockReleased released;
            return self.prepare({.dsts = std::move(dsts),
                                 .srcs = std::move(srcs),
                                 .sizes = std::move(sizes),
                                 .dst_home = dst_home,
                                 .src_home = src_home,
                                 .memories = std::move(memories)});
          },
          nb::arg("dsts"), nb::arg("srcs"), nb::arg("sizes"), nb::arg("dst_home"),
          nb::arg("src_home"), nb::arg("memories"))
      .def("post", &CopyRequests::post, nb::arg("request"), Unlocked())
      .def("done", &CopyRequests::done, nb::arg("request"), Unlocked())
      .def(
          "cancel",
          [](CopyRequests& self, CopyRequest& request, double timeout_s) {
            LockReleased released;
            self.cancel(request, released.within(timeout_s));
          },
          nb::arg("request"), nb::arg("timeout_s"));
}

}  // namespace offcore
