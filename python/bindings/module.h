// The extension module: one file per area, nothing clever.
#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace offcore {

void bind_base(nb::module_& module);
void bind_ir(nb::module_& module);
void bind_machine(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_batch(nb::module_& module);
void bind_copy_requests(nb::module_& module);  // after bind_batch
void bind_backend(nb::module_& module);
void bind_window(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_comm(nb::module_& module);
void bind_plain_calls(nb::module_& module);  // after bind_comm
void bind_proof(nb::module_& module);
void bind_requests(nb::module_& module);  // after bind_comm
void bind_pool(nb::module_& module);      // after bind_comm, which binds Window
void bind_kv(nb::module_& module);
void bind_sdma(nb::module_& module);  // after bind_ir, which binds Program
void bind_tree(nb::module_& module);
void bind_mcast(nb::module_& module);

}  // namespace offcore
