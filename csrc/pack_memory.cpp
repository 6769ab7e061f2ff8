#include "pack_memory.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

#include "common.h"

namespace tokenmill {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = std::size_t{32} << 20;

class Chunk {
 public:
  // Maps one huge page too many, so that there is an aligned start; pages that nobody touches
  // take no memory.
  explicit Chunk(std::size_t size) : mapped_(size + kHugePage) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    begin_ = round_up(reinterpret_cast<std::uintptr_t>(base_), std::uintptr_t{kHugePage});
    end_ = begin_ + size;
    madvise(reinterpret_cast<void*>(begin_), size, MADV_HUGEPAGE);
  }
  ~Chunk() { munmap(base_, mapped_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  void* take(std::size_t num_bytes) {
    if (num_bytes > end_ - begin_) return nullptr;
    void* taken = reinterpret_cast<void*>(begin_);
    begin_ += num_bytes;
    return taken;
  }

 private:
  std::size_t mapped_;
  void* base_;
  std::uintptr_t begin_ = 0, end_ = 0;
};

}  // namespace

std::shared_ptr<void> allocate_weights(std::size_t num_bytes) {
  static std::mutex mutex;
  static std::shared_ptr<Chunk> current;
  num_bytes = round_up(num_bytes == 0 ? std::size_t{1} : num_bytes, kCacheLine);
  if (num_bytes > kChunk / 4) {
    auto own = std::make_shared<Chunk>(round_up(num_bytes, kHugePage));
    return {own, own->take(num_bytes)};
  }
  std::lock_guard<std::mutex> lock(mutex);
  void* taken = current ? current->take(num_bytes) : nullptr;
  if (taken == nullptr) {
    current = std::make_shared<Chunk>(kChunk);
    taken = current->take(num_bytes);
  }
  return {current, taken};
}

}  // namespace tokenmill
