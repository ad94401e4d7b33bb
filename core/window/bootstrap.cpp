#include "core/window/bootstrap.h"

#include <string_view>
#include <utility>

#include "core/base/env.h"
#include "core/base/hmac.h"
#include "core/window/address.h"
#include "core/window/proof.h"
#include "core/window/socket.h"

namespace offcore {
namespace {

std::string code_of(const std::string& secret, std::string_view said) {
  return hmac_sha256(secret, "offcore card " + std::string(said));
}

}  // namespace

Bootstrap::Bootstrap(std::string where, uint32_t rank, uint32_t ranks, AllGather all_gather)
    : where_(std::move(where)), rank_(rank), ranks_(ranks), all_gather_(std::move(all_gather)) {
  if (rank < ranks) return;
  fail(Code::invalid, "rank is ", rank, "; with a world size of ", ranks, " it must lie in 0..",
       ranks - 1);
}

Bootstrap Bootstrap::at(const std::string& address, uint32_t rank, uint32_t ranks) {
  port_of(address);
  return {address, rank, ranks, [=](const std::string& bytes, const Deadline& deadline) {
            return all_gather_at(address, rank, ranks, bytes, deadline);
          }};
}

std::vector<std::string> Bootstrap::all_gather(const std::string& bytes,
                                               const Deadline& deadline) const {
  if (bytes.size() > kCardBytesMax) {
    fail(Code::invalid, bytes.size(), " bytes of connection data: at most ", kCardBytesMax);
  }
  std::vector<std::string> all = all_gather_(bytes, deadline);
  if (all.size() == ranks_) return all;
  fail(Code::mismatch, all.size(), " ranks came to ", where_, ", rank ", rank_, " expects ",
       ranks_);
}

Roster Bootstrap::meet(const std::string& card, const Deadline& deadline) const {
  Roster roster{.secret = env("OFFCORE_JOB_SECRET"), .key = "", .cards = {}};
  const std::string nonce = random_bytes(Seal::kNonceBytes);
  const std::string said = Packer().number(rank_).text(nonce).text(card).bytes();
  Packer all;
  for (const std::string& one : all_gather(code_of(roster.secret, said) + said, deadline)) {
    const std::string_view code = std::string_view(one).substr(0, kHmacBytes);
    const std::string_view theirs = std::string_view(one).substr(code.size());
    Unpacker unpacker(theirs);
    const bool own = unpacker.number<uint32_t>() == roster.cards.size();
    unpacker.text();
    const std::string their_card(unpacker.text());
    if (!equal_codes(code, code_of(roster.secret, theirs)) || !own || !unpacker.ok()) {
      fail(Code::mismatch, "rank ", roster.cards.size(),
           " has another OFFCORE_JOB_SECRET than rank ", rank_, ": give all ranks the same");
    }
    roster.cards.push_back(their_card);
    all.text(one);
  }
  roster.key = hmac_sha256(roster.secret, "offcore key " + all.bytes());
  return roster;
}

}  // namespace offcore
