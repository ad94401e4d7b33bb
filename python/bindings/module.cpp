#include "module.h"

NB_MODULE(_core, module) {
  // Objects that a script still holds when Python ends are no news to its user.
  nb::set_leak_warnings(false);
  offcore::bind_base(module);
  offcore::bind_ir(module);
  offcore::bind_machine(module);
  offcore::bind_plan(module);
  offcore::bind_batch(module);
  offcore::bind_copy_requests(module);
  offcore::bind_backend(module);
  offcore::bind_window(module);
  offcore::bind_tensors(module);
  offcore::bind_comm(module);
  offcore::bind_plain_calls(module);
  offcore::bind_proof(module);
  offcore::bind_requests(module);
  offcore::bind_pool(module);
  offcore::bind_kv(module);
  offcore::bind_sdma(module);
  offcore::bind_tree(module);
  offcore::bind_mcast(module);
}
