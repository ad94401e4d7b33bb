// Which entry points there are, and since which driver.
#pragma once

namespace fakecuda {

// The first driver that had an entry point of this name, of any form; 0 for an unknown name.
int oldest_driver(const char* name);

struct Found {
  bool known = false;  // `driver` has the name, in whatever form
  void* function = nullptr;
};

// The newest form of `name` that callers built for `version` know and `driver` has.
Found find_symbol(const char* name, int version, int driver);

}  // namespace fakecuda
