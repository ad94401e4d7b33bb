// What it takes to make the commands of KV pages: by the direct builder, as transfers do, and by
// the planner of batches, which finds by itself what folds. Nothing is copied.
//
//     g++ -O2 -std=c++20 -I. benchmarks/kv_plan.cpp build/RELEASE/liboffcore_core.a -ldl -pthread \
//         -o /tmp/kv_plan && /tmp/kv_plan
//
// 1,008 pages: 36 scattered blocks of 28 layers, at equal steps or in layers of any steps.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>

#include "core/ir/verify.h"
#include "core/kv/command_builder.h"
#include "core/plan/batch.h"
#include "core/plan/plan.h"

using namespace offcore;

namespace {

constexpr uint32_t kLayers = 28;
constexpr uint64_t kBlocks = 72;
constexpr size_t kNamed = 36;
constexpr int kTurns = 400;

Machine machine_of_pages() {
  Machine machine;
  machine.name = "pages";
  machine.ranks = 2;
  machine.engines_peer = 8;
  machine.engines_host = 2;
  machine.topology = Topology::switched;
  machine.native = {.strided = true, .bcst_rows = 8, .strided_flags = true};
  machine.links = {390, 390, 390, 55, 545, 390, 91, 91, 91};
  machine.cost.issue_ns = 2250;
  machine.batches = {.b2b_bytes_max = 4 << 20,
                     .call_min = 8,
                     .sub_batch = 32,
                     .sub_batch_max = 128,
                     .copy_ns = 650};
  machine.pages = {16, 32 << 10, 4, 16 << 10, 256 << 10, 2 << 20, 30'000};
  return machine;
}

double least_us(const std::function<void()>& work) {
  double least = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const auto began = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
    least = std::min(least, took.count());
  }
  return least;
}

// Layers at equal steps, or where none is like another.
std::shared_ptr<const kv::Layout> layout_of(uint64_t page, bool even) {
  std::vector<kv::Piece> pieces;
  uint64_t at = uint64_t{1} << 40;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    pieces.push_back({reinterpret_cast<std::byte*>(at), page, page, layer, layer});
    at += kBlocks * page + (even ? 0 : layer * layer * 4096);
  }
  return std::make_shared<const kv::Layout>(std::move(pieces), kBlocks);
}

void measure(uint64_t page, bool even) {
  const Machine machine = machine_of_pages();
  const auto layout = layout_of(page, even);
  std::vector<uint64_t> memories(kLayers);
  if (!even) std::iota(memories.begin(), memories.end(), 0);
  const auto groups = std::make_shared<const std::vector<kv::LayerGroup>>(
      kv::layer_groups_of(*layout, kLayers, memories));
  std::mt19937 random(1);
  std::vector<int64_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::vector<int64_t> slots = blocks;
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::shuffle(slots.begin(), slots.end(), random);
  blocks.resize(kNamed);
  const uint64_t rows_at = uint64_t{1} << 45;
  std::vector<kv::Row> rows;
  for (size_t i = 0; i < kNamed; ++i) {
    const uint64_t at = rows_at + static_cast<uint64_t>(slots[i]) * layout->row_bytes();
    rows.push_back({.at = reinterpret_cast<std::byte*>(at)});
  }
  const kv::PartBudget budget{{.bytes = uint64_t{8} << 20, .strided = 256, .plain = 256}};
  const std::vector<Buffer> buffers = {
      {.name = "cache", .kind = Buffer::Home::local, .bytes = layout->span()},
      {.name = "rows", .kind = Buffer::Home::host, .bytes = kBlocks * layout->row_bytes()}};
  size_t copies = 0;
  size_t parts = 0;
  const auto direct = [&](bool legal, bool checked) {
    kv::CommandBuilder builder(kv::Direction::load, PageForms(machine, true, std::nullopt), layout,
                               groups, blocks, rows);
    copies = parts = 0;
    while (!builder.ended()) {
      kv::Part part = builder.next(budget);
      copies += part.copies;
      ++parts;
      Program program{.op = "kv_load",
                      .machine = "pages",
                      .variant = "b2b",
                      .ranks = 1,
                      .buffers = {flag_buffer()}};
      program.buffers.insert(program.buffers.end(), buffers.begin(), buffers.end());
      if (part.pages_at) {  // as core/kv/submit.cpp has them
        const uint64_t bytes = part.pages_at->blocks.size() * part.pages_at->block_bytes;
        program.buffers.push_back({.name = "stage", .kind = Buffer::Home::local});
        program.buffers.push_back({.name = "pages", .kind = Buffer::Home::paged, .bytes = bytes});
      }
      program.queues.push_back({.commands = std::move(part.commands)});
      if (legal) program = legalize(std::move(program), machine);
      if (checked) verify(program);
    }
  };
  const double built = least_us([&] { direct(false, false); });
  const double legalized = least_us([&] { direct(true, false); });
  const double verified = least_us([&] { direct(true, true); });
  Moves moves{.op = "batch", .ranks = 1, .buffers = {flag_buffer()}};
  moves.buffers.insert(moves.buffers.end(), buffers.begin(), buffers.end());
  const auto list = [&] {
    moves.moves.clear();
    for (size_t i = 0; i < kNamed; ++i) {
      uint64_t row = static_cast<uint64_t>(slots[i]) * layout->row_bytes();
      for (const kv::Piece& piece : layout->pieces()) {
        const auto at = static_cast<uint64_t>(piece.address - layout->base());
        const uint64_t block = static_cast<uint64_t>(blocks[i]) * piece.block_step;
        moves.moves.push_back({{at + block, 0, 1}, {row, kHostRank, 2}, piece.bytes});
        row += piece.bytes;
      }
    }
  };
  size_t planned_copies = 0;
  const double planned = least_us([&] {
    list();
    const Batch batch = plan_batch(moves, {}, {.timed = false}, machine);
    planned_copies = 0;
    for (const Command& command : batch.program->queues[0].commands) {
      planned_copies += command.op == Op::copy;
    }
  });
  std::printf("%6llu %-5s %5zu %3zu %8.1f %8.1f %8.1f %5zu %8.1f\n",
              static_cast<unsigned long long>(page), even ? "even" : "any", copies, parts, built,
              legalized, verified, planned_copies, planned);
}

}  // namespace

int main() {
  std::printf("  page steps copies parts direct legalize verify batch's copies plan_batch\n");
  for (const bool even : {true, false}) {
    for (const uint64_t page : {8 << 10, 16 << 10, 64 << 10}) measure(page, even);
  }
}
