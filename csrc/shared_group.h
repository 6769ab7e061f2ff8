// Ranks of one machine that compute on parts of the same model: sums and joins of what each has, in
// memory that all of them map.
//
//   | broken | rank 0: arrived, sleepers, tags | rank 1: ... |   lines of their own
//   | rank 0: slot, slot | rank 1: slot, slot | ...             `slot_bytes` each
//
// An operation goes in rounds of a slot. In a round each rank fills its slot, says so, waits for the
// others, and reads all slots in the order of ranks: so a sum has the same bits on every rank, and
// for any number of rows. Rounds use the two slots in turn. Whoever fills one again has seen all
// others arrive in the round between, which they do only once they have read it; there is no other
// barrier.
//
// Every round carries a tag of what it belongs to and of the operation's size. Ranks that do not do
// the same, since one of them has failed in between, find that out, and the group is broken for good.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokenmill {

class SharedGroup {
 public:
  static std::size_t memory_bytes(int size, std::size_t slot_bytes);

  // `memory` is zeroed, aligned to 64 bytes, of `memory_bytes`, and outlives this object.
  // `slot_bytes` is a multiple of 64.
  SharedGroup(void* memory, int rank, int size, std::size_t slot_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // What follows belongs to this: all ranks begin the same.
  void begin(std::uint32_t mark) { mark_ = mark; }

  // Replaces values [count] by their sum over the ranks, ((0 + 1) + 2) + ... Throws
  // std::runtime_error if the group is broken.
  void all_reduce(float* values, std::int64_t count);

  // Puts the ranks' columns side by side: rank r has [num_rows, widths[r]], out has
  // [num_rows, sum of widths]. Throws as `all_reduce` does.
  void all_gather(const float* columns, int num_rows, const std::vector<int>& widths, float* out);

  // Has all ranks fail that wait, or come later.
  void break_up();
  bool is_broken() const;

 private:
  struct Line;

  Line& line(int rank) const;
  float* slot(int rank) const;
  void exchange(std::uint64_t tag);
  void wait_for(int rank);
  void check_whole() const;

  char* memory_;
  int rank_, size_;
  std::size_t slot_bytes_;
  std::uint32_t round_ = 0;
  std::uint32_t mark_ = 0;
};

}  // namespace tokenmill
