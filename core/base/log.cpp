#include "core/base/log.h"

#include <cstdio>

#include "core/base/env.h"

namespace offcore {

Log::Log(std::string who) : who_(std::move(who)) {
  const std::string level = env("OFFCORE_LOG");
  if (level == "info") {
    level_ = Level::info;
  } else if (level == "debug") {
    level_ = Level::debug;
  }
}

// One write, so that the lines of several ranks do not mix.
void Log::write(const std::string& text) const {
  const std::string line = cat("offcore: ", who_, ": ", text, "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace offcore
