// Lines on stderr that tell what was chosen, by OFFCORE_LOG: off, info or debug.
#pragma once
#include <cstdint>
#include <string>

#include "core/base/error.h"

namespace offcore {

class Log {
 public:
  enum class Level : uint8_t { off, info, debug };

  // Reads OFFCORE_LOG. `who` begins every line. Throws invalid for a level that is none.
  explicit Log(std::string who);

  bool shows(Level level) const { return level <= level_; }
  template <typename... Parts>
  void info(const Parts&... parts) const {
    if (shows(Level::info)) write(cat(parts...));
  }
  template <typename... Parts>
  void debug(const Parts&... parts) const {
    if (shows(Level::debug)) write(cat(parts...));
  }

 private:
  void write(const std::string& text) const;

  std::string who_;
  Level level_ = Level::off;
};

}  // namespace offcore
