// Strict and total: every byte of a text is accounted for, or parse throws with its place.
#include "core/ir/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/error.h"

namespace offcore {
namespace {

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == ':' || c == '-';
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

std::string rank_text(Rank rank) { return rank == kHostRank ? "host" : std::to_string(rank); }

std::string slice_text(const Slice& slice, const Program& program) {
  // Verify prints commands that it rejects, so an unknown buffer must print as well.
  const std::string name = slice.buffer < program.buffers.size()
                               ? program.buffers[slice.buffer].name
                               : cat("buffer-", unsigned{slice.buffer});
  return cat(name, '[', rank_text(slice.rank), ']', slice.buffer == kFlagBuffer ? ':' : '+',
             slice.offset);
}

// As few digits as read back to the same number.
std::string shortest(double number) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, number);
  return std::string(text, end);
}

std::string step_text(int64_t step) { return step == kRankStep ? "rank" : std::to_string(step); }

// One line of the text and a place in it. Every read either succeeds or throws with the place.
class TextLine {
 public:
  TextLine(std::string_view text, size_t number) : text_(text), number_(number) {}

  [[noreturn]] void fail_at(size_t at, std::string_view what) const {
    fail(Code::invalid, "line ", number_, ", column ", at + 1, ": ", what);
  }
  [[noreturn]] void fail_here(std::string_view what) const { fail_at(at_, what); }

  size_t at() const { return at_; }
  bool at_end() const { return at_ == text_.size(); }

  bool skip_blanks() {
    const size_t start = at_;
    while (!at_end() && is_blank(text_[at_])) ++at_;
    return at_ > start;
  }

  void expect_blank(std::string_view what) {
    if (!skip_blanks()) fail_here(cat("expected a space before ", what));
  }

  bool take(std::string_view literal) {
    if (!text_.substr(at_).starts_with(literal)) return false;
    at_ += literal.size();
    return true;
  }

  void expect(std::string_view literal) {
    if (!take(literal)) fail_here(cat("expected '", literal, "'"));
  }

  void expect_end() {
    skip_blanks();
    if (!at_end()) fail_here("expected the end of the line");
  }

  std::string_view name(std::string_view what) {
    const size_t start = at_;
    while (!at_end() && is_name_char(text_[at_])) ++at_;
    if (at_ == start) fail_here(cat("expected ", what));
    return text_.substr(start, at_ - start);
  }

  uint64_t number(std::string_view what, uint64_t max, uint64_t min = 0) {
    const size_t start = at_;
    const int base = take("0x") ? 16 : 10;
    uint64_t value = 0;
    const char* end = text_.data() + text_.size();
    const auto [stop, error] = std::from_chars(text_.data() + at_, end, value, base);
    const bool fits = error == std::errc() && value >= min && value <= max;
    if (error == std::errc::invalid_argument) fail_at(start, cat("expected ", what, ", a number"));
    if (!fits) fail_at(start, cat("expected ", what, " from ", min, " to ", max));
    at_ = static_cast<size_t>(stop - text_.data());
    return value;
  }

  double real(std::string_view what) {
    const size_t start = at_;
    double value = 0;
    const char* end = text_.data() + text_.size();
    const auto [stop, error] = std::from_chars(text_.data() + at_, end, value);
    if (error != std::errc() || !std::isfinite(value)) {
      fail_at(start, cat("expected ", what, ", a finite number"));
    }
    at_ = static_cast<size_t>(stop - text_.data());
    return value;
  }

 private:
  std::string_view text_;
  size_t number_;
  size_t at_ = 0;
};

class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  Program parse() {
    while (has_text_) {
      TextLine line = next_line();
      line.skip_blanks();
      if (!line.at_end()) statement(line);
    }
    if (!in_program_)
      TextLine("", number_).fail_here("expected 'program OP machine=... ranks=...'");
    return std::move(program_);
  }

 private:
  TextLine next_line() {
    const size_t length = rest_.find('\n');
    std::string_view line = rest_.substr(0, length);
    has_text_ = length != std::string_view::npos;
    rest_ = has_text_ ? rest_.substr(length + 1) : std::string_view();
    return TextLine(line.substr(0, line.find('#')), ++number_);
  }

  void statement(TextLine& line) {
    const size_t start = line.at();
    const std::string_view word = line.name("a statement");
    if (!in_program_) {
      if (word != "program") line.fail_at(start, "expected 'program' as the first statement");
      header(line);
    } else if (word == "buffer") {
      if (!program_.queues.empty()) line.fail_at(start, "expected buffers before the first queue");
      buffer(line);
    } else if (word == "reduction") {
      if (program_.buffers.size() > 1 || !program_.queues.empty() || program_.reduction) {
        line.fail_at(start, "expected one reduction, before the first buffer");
      }
      reduction(line);
    } else if (word == "queue") {
      queue(line);
    } else if (word == "program") {
      line.fail_at(start, "expected one program only");
    } else {
      Command command;
      if (!operation(word, command.op)) {
        line.fail_at(start, cat("expected buffer, queue, copy, swap, poll, signal, timestamp, "
                                "fence or reduce instead of '",
                                word, "'"));
      }
      if (program_.queues.empty()) line.fail_at(start, "expected a queue before its commands");
      operands(line, command);
      program_.queues.back().commands.push_back(command);
    }
    line.expect_end();
  }

  void field(TextLine& line, std::string_view key) {
    line.expect_blank(cat("'", key, "'"));
    line.expect(key);
  }

  template <typename Value>
  Value choice(TextLine& line, std::string_view what, std::initializer_list<Value> values) {
    const size_t start = line.at();
    const std::string_view word = line.name(what);
    std::string known;
    for (const Value value : values) {
      if (to_string(value) == word) return value;
      known += cat(known.empty() ? "" : ", ", to_string(value));
    }
    line.fail_at(start, cat("expected ", what, ", one of ", known));
  }

  void header(TextLine& line) {
    line.expect_blank("the operation");
    program_.op = line.name("the operation's name");
    field(line, "machine=");
    program_.machine = line.name("the machine's name");
    field(line, "ranks=");
    program_.ranks = static_cast<Rank>(line.number("ranks", kRanksMax, 1));
    field(line, "variant=");
    program_.variant = line.name("the variant's name");
    field(line, "mode=");
    program_.mode = choice(line, "the mode", {Mode::eager, Mode::capture, Mode::armed});
    field(line, "protocol=");
    program_.protocol =
        choice(line, "the protocol",
               {Protocol::barrier, Protocol::credits, Protocol::eager, Protocol::promise});
    field(line, "native=");
    program_.native = line.take("yes");
    if (!program_.native && !line.take("no")) line.fail_here("expected yes or no");
    field(line, "flags=");
    program_.flag_words = static_cast<uint32_t>(line.number("flags", UINT32_MAX));
    field(line, "span=");
    program_.flag_span = static_cast<uint16_t>(line.number("span", UINT16_MAX));
    program_.buffers.push_back(flag_buffer());
    in_program_ = true;
  }

  void reduction(TextLine& line) {
    line.expect_blank("the reduction");
    Reduction& reduction = program_.reduction.emplace();
    reduction.op =
        choice(line, "the reduction",
               {ReduceOp::sum, ReduceOp::avg, ReduceOp::premul_sum, ReduceOp::min, ReduceOp::max});
    line.expect_blank("the dtype");
    reduction.dtype = choice(line, "the dtype",
                             {DType::i8, DType::u8, DType::i16, DType::i32, DType::i64, DType::f16,
                              DType::bf16, DType::f32, DType::f64});
    if (reduction.op != ReduceOp::premul_sum) return;
    field(line, "scale=");
    reduction.scale = line.real("the scale");
  }

  void buffer(TextLine& line) {
    using HomeName = Buffer::Home;
    line.expect_blank("the buffer's name");
    const size_t start = line.at();
    Buffer buffer{.name = std::string(line.name("the buffer's name"))};
    if (find_buffer(buffer.name) != program_.buffers.size()) {
      line.fail_at(start, cat("expected a name other than '", buffer.name, "', which is taken"));
    }
    if (program_.buffers.size() > std::numeric_limits<BufferId>::max()) {
      line.fail_at(start, "expected at most 255 buffers");
    }
    line.expect_blank("the kind");
    buffer.kind = choice(line, "the kind",
                         {HomeName::window, HomeName::local, HomeName::host, HomeName::paged});
    line.expect_blank("the size");
    buffer.bytes = line.number("the size in bytes", UINT64_MAX);
    program_.buffers.push_back(std::move(buffer));
  }

  void queue(TextLine& line) {
    line.expect_blank("the queue's name");
    const size_t start = line.at();
    Queue queue;
    queue.rank = static_cast<Rank>(line.number("the queue's rank", kHostRank - 1));
    line.expect(".");
    queue.index =
        line.take("caller")
            ? kCallerQueue
            : static_cast<uint16_t>(line.number("the queue's index (or caller)", kCallerQueue - 1));
    if (!program_.queues.empty()) {
      const Queue& last = program_.queues.back();
      if (std::pair(queue.rank, queue.index) <= std::pair(last.rank, last.index)) {
        line.fail_at(start, cat("expected queues in order of rank and index, caller last; ",
                                queue_name(queue), " follows ", queue_name(last)));
      }
    }
    program_.queues.push_back(std::move(queue));
  }

  static bool operation(std::string_view word, Op& op) {
    for (const Op known :
         {Op::copy, Op::swap, Op::poll, Op::signal, Op::timestamp, Op::fence, Op::reduce}) {
      if (to_string(known) != word) continue;
      op = known;
      return true;
    }
    return false;
  }

  void operands(TextLine& line, Command& command) {
    if (command.op == Op::fence) return;
    line.expect_blank("the operand");
    if (command.op == Op::timestamp) {
      command.value = static_cast<uint16_t>(line.number("the timestamp's number", UINT16_MAX));
      return;
    }
    command.dst = slice(line);
    if (command.op == Op::reduce) return sources(line, command);
    if (moves_data(command.op)) {
      field(line, command.op == Op::swap ? "<->" : "<-");
      line.expect_blank("the source");
      command.src = slice(line);
      field(line, "bytes=");
      command.bytes = line.number("bytes", UINT64_MAX);
    } else {
      field(line, command.op == Op::poll ? ">=" : "=");
      line.expect_blank("the value");
      command.value = static_cast<uint16_t>(line.number("the value", UINT16_MAX));
    }
    rows(line, command);
  }

  void sources(TextLine& line, Command& command) {
    field(line, "<-");
    line.expect_blank("the source");
    command.src = slice(line);
    field(line, "bytes=");
    command.bytes = line.number("bytes", UINT64_MAX);
    field(line, "rows=");
    command.rows = static_cast<uint32_t>(line.number("rows", UINT32_MAX));
    field(line, "src_step=");
    command.src_step = static_cast<int64_t>(line.number("a step", INT64_MAX));
    if (!line.skip_blanks() || line.at_end()) return;
    line.expect("own=");
    command.value = static_cast<uint16_t>(line.number("the own source's index", UINT16_MAX));
    line.expect_blank("the own source");
    const size_t start = line.at();
    const Slice own = slice(line);
    if (own.buffer == kFlagBuffer || own.rank != command.dst.rank || own.offset > INT64_MAX) {
      line.fail_at(start, "expected the own source in a buffer of the destination's rank");
    }
    command.own = own.buffer;
    command.dst_step = static_cast<int64_t>(own.offset);
  }

  void rows(TextLine& line, Command& command) {
    const bool separate = line.skip_blanks();
    if (line.at_end()) return;
    if (!separate || !line.take("rows=")) line.fail_here("expected rows= or the end of the line");
    const size_t start = line.at();
    command.rows = static_cast<uint32_t>(line.number("rows", UINT32_MAX));
    if (command.rows == 1) line.fail_at(start, "expected rows other than 1, which is left out");
    field(line, moves_data(command.op) ? "dst_step=" : "step=");
    command.dst_step = step(line);
    if (!moves_data(command.op)) return;
    field(line, "src_step=");
    command.src_step = step(line);
  }

  Slice slice(TextLine& line) {
    const size_t start = line.at();
    const std::string_view name = line.name("a buffer's name");
    const size_t id = find_buffer(name);
    if (id == program_.buffers.size()) {
      line.fail_at(start, cat("expected a declared buffer instead of '", name, "'"));
    }
    Slice slice{.buffer = static_cast<BufferId>(id)};
    line.expect("[");
    slice.rank = line.take("host")
                     ? kHostRank
                     : static_cast<Rank>(line.number("a rank (or host)", kHostRank - 1));
    line.expect("]");
    line.expect(id == kFlagBuffer ? ":" : "+");
    slice.offset = line.number(id == kFlagBuffer ? "a word" : "an offset", UINT64_MAX);
    return slice;
  }

  int64_t step(TextLine& line) {
    if (line.take("rank")) return kRankStep;
    const bool negative = line.take("-");
    const auto size = static_cast<int64_t>(line.number("a step (or rank)", INT64_MAX));
    return negative ? -size : size;
  }

  size_t find_buffer(std::string_view name) const {
    const auto found = std::find_if(program_.buffers.begin(), program_.buffers.end(),
                                    [&](const Buffer& buffer) { return buffer.name == name; });
    return static_cast<size_t>(found - program_.buffers.begin());
  }

  std::string_view rest_;
  bool has_text_ = true;
  bool in_program_ = false;
  size_t number_ = 0;
  Program program_;
};

}  // namespace

bool is_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), is_name_char);
}

std::string print(const Command& command, const Program& program) {
  std::string text(to_string(command.op));
  if (command.op == Op::fence) return text;
  if (command.op == Op::timestamp) return cat(text, ' ', command.value);
  text += cat(' ', slice_text(command.dst, program));
  if (command.op == Op::reduce) {
    text += cat(" <- ", slice_text(command.src, program), " bytes=", command.bytes,
                " rows=", command.rows, " src_step=", command.src_step);
    if (command.own == kFlagBuffer) return text;
    return text +
           cat(" own=", command.value, ' ', slice_text(source_of(command, command.value), program));
  }
  if (moves_data(command.op)) {
    text += cat(command.op == Op::swap ? " <-> " : " <- ", slice_text(command.src, program),
                " bytes=", command.bytes);
  } else {
    text += cat(command.op == Op::poll ? " >= " : " = ", command.value);
  }
  if (command.rows == 1) return text;
  if (!moves_data(command.op)) {
    return text + cat(" rows=", command.rows, " step=", step_text(command.dst_step));
  }
  return text + cat(" rows=", command.rows, " dst_step=", step_text(command.dst_step),
                    " src_step=", step_text(command.src_step));
}

std::string print(const Program& program) {
  std::string text =
      cat("program ", program.op, " machine=", program.machine, " ranks=", program.ranks,
          " variant=", program.variant, " mode=", to_string(program.mode),
          " protocol=", to_string(program.protocol), " native=", program.native ? "yes" : "no",
          " flags=", program.flag_words, " span=", program.flag_span, '\n');
  if (program.reduction) {
    const Reduction& reduction = *program.reduction;
    text += cat("reduction ", to_string(reduction.op), ' ', to_string(reduction.dtype));
    if (reduction.op == ReduceOp::premul_sum) text += cat(" scale=", shortest(reduction.scale));
    text += '\n';
  }
  for (size_t id = kFlagBuffer + 1; id < program.buffers.size(); ++id) {
    const Buffer& buffer = program.buffers[id];
    text += cat("buffer ", buffer.name, ' ', to_string(buffer.kind), ' ', buffer.bytes, '\n');
  }
  for (const Queue& queue : program.queues) {
    text += cat("queue ", queue_name(queue), '\n');
    for (const Command& command : queue.commands) {
      text += cat("  ", print(command, program), '\n');
    }
  }
  return text;
}

Program parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace offcore
