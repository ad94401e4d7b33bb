// Which flag word stands for what: words of a reader (or of the host, where the machine keeps flags
// there), with N ranks, Q engines a rank on the machine and D = kChunkWords:
//
//   r                  entry: rank r has entered and its buffers may be written
//   N + r              start of rank r's prelaunched queues
//   2N + p*Q + k       exit: queue k of rank p has delivered
//   from R = 2N + N*Q on, of programs that go in chunks:
//   R + p*D + c        rank p has delivered its share of a chunk whose number is c, modulo D
//   R + N*D + p*D + c  rank p has delivered a reduced chunk
//   R + 2N*D + r*D + c the reader itself, rank r, has reduced a chunk, or sent it
//   R + 3N*D + t*N + q rank q has emptied so many chunks of its slots: t = 0 exchanged, 1 gathered
//
// A word has the same writing rank in every program of a machine. Launches of different programs
// share a lane's words, and a rank that is one launch ahead must not pass for another. In host
// memory, words from R on are one a reader.
#pragma once
#include <cstdint>
#include <vector>

#include "core/ir/program.h"
#include "core/machine/machine.h"
#include "core/plan/chunks.h"

namespace offcore {

class FlagWords {
 public:
  FlagWords(const Machine& machine, Rank ranks)
      : ranks_(ranks), engines_(machine.engines_peer), host_(machine.flags == FlagHome::host) {}

  bool on_host() const { return host_; }
  uint64_t entry(Rank rank) const { return rank; }
  uint64_t start(Rank rank) const { return uint64_t{ranks_} + rank; }
  uint64_t exit(Rank rank, uint64_t queue) const {
    return 2u * ranks_ + uint64_t{rank} * engines_ + queue;
  }
  uint64_t exchanged(Rank rank, uint32_t chunk) const { return of_chunk(0, rank, chunk); }
  uint64_t gathered(Rank rank, uint32_t chunk) const { return of_chunk(1, rank, chunk); }
  uint64_t passed(Rank rank, uint32_t chunk) const { return of_chunk(2, rank, chunk); }
  uint64_t free(Rank rank, uint32_t ring) const {
    return of_chunk(3, 0, 0) + uint64_t{ring} * ranks_ + rank;
  }

  // The value of a chunk's words.
  static uint16_t value_of(uint32_t chunk) {
    return static_cast<uint16_t>(chunk / kChunkWords + 1);
  }

  // Words of programs that do not go in chunks, and of all.
  uint32_t whole() const { return 2u * ranks_ + uint32_t{ranks_} * engines_; }
  uint32_t count() const {
    const auto chunked = static_cast<uint32_t>(of_chunk(3, 0, 0) + 2u * ranks_) - whole();
    return whole() + chunked * (host_ ? ranks_ : 1u);
  }

  Slice at(Rank reader, uint64_t word) const {
    if (!host_) return {word, reader, kFlagBuffer};
    const uint64_t first = whole();
    return {word < first ? word : first + (word - first) * ranks_ + reader, kHostRank, kFlagBuffer};
  }

  // Tells every reader by its word: one command a run of neighbouring ranks, or one in all where
  // they share a word in host memory.
  void signal(std::vector<Command>& commands, const std::vector<Rank>& readers, uint64_t word,
              uint16_t value) const;
  // Waits until all of these words of a reader have the value: one command a run of equal steps.
  void poll(std::vector<Command>& commands, Rank reader, const std::vector<uint64_t>& words,
            uint16_t value) const;

 private:
  uint64_t of_chunk(uint64_t kind, Rank rank, uint32_t chunk) const {
    return whole() + (kind * ranks_ + rank) * kChunkWords + chunk % kChunkWords;
  }

  Rank ranks_;
  uint32_t engines_;
  bool host_;
};

}  // namespace offcore
