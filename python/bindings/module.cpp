#include "module.h"

NB_MODULE(_core, module) {
  offcore::bind_base(module);
  offcore::bind_ir(module);
  offcore::bind_machine(module);
  offcore::bind_plan(module);
  offcore::bind_backend(module);
  offcore::bind_window(module);
  offcore::bind_comm(module);
}
