// How to move: DMA-Latte's variants (section 4). `fan` is ours: one command for all peers.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace offcore {

struct Variant {
  enum class Shape : uint8_t {
    pcpy,       // parallel copies: one command a destination, spread over engines (4.1)
    bcst,       // one source, several destinations in a command (4.2)
    swap,       // two ranges exchanged in a command, in place (4.3)
    b2b,        // all copies to peers back to back on one engine, one signal (4.4)
    fan,        // strided: one command for all destinations
    pipelined,  // in chunks, by way of slots (see pipeline.h)
  };
  Shape kind = Shape::pcpy;
  bool prelaunch = false;    // armed ahead and started by a word (4.5)
  uint16_t engines = 0;      // at most this many engines a rank; 0: as many as the kind wants
  uint64_t chunk_bytes = 0;  // of pipelined; 0: by the cost model

  friend bool operator==(const Variant&, const Variant&) = default;
};

// Whether what a rank sends goes through one engine, in its order, on every machine.
bool one_engine(const Variant& variant);

std::string to_string(const Variant& variant);  // "prelaunch_pcpy", "pcpy:2", "pipelined:1M"
Variant parse_variant(std::string_view text);   // throws invalid, naming the known ones
std::vector<Variant> all_variants();

// What `auto` stands for by OFFCORE_VARIANT: a variant's text, or "auto". Throws invalid, with the
// variable's name.
std::string default_variant();

}  // namespace offcore
