// Attention over a paged cache: the layout of the cache, a step's tables, what a kernel is called
// with.
//
// Cache [num_blocks][K, V][num_kv_heads] parts of block_size tokens. A part consists of groups,
// each contiguous, in words of 32 bits: two bf16 values or one float32 value.
//
//   K  groups of 16 tokens   bf16     [head_size/2 pairs of values][16 tokens]
//                            float32  [head_size values][16 tokens]
//   V  groups of 32 tokens   bf16     [head_size/16][16 pairs of tokens][16 values]
//                            float32  [head_size/16][32 tokens][16 values]
//   int8 has the order of bf16, a byte a value, and behind each group a float32 scale a token
//
// Where values are parts of keys (a latent that serves as both), there is no V: kernels put those
// of a few keys in the order of V when they need them (attention_latents.h).
//
// So 16 lanes are 16 tokens of K or 16 values of V, and an AMX tile is 1 KiB of memory in one piece.
//
// Arithmetic, of each row (a query and a head) by itself:
//   partition   256 keys, from a multiple of 256 on, always
//     s         q . k in float32, soft-capped
//     m         largest s of the visible keys
//     p         exp((s - m) * scale), 0 for hidden keys; l = their sum, 16 lanes, then the lanes
//     o         p . v from zero, with p rounded to the cache's type
//   int8        q is rounded to bf16, and p times the scales of V
//     amx       to bf16 as well; codes are multiplied as bf16
//     others    to codes of 16 bits of the largest of the partition, and q to those of its largest
//               value; codes are multiplied exactly. Both lose less than the codes of K and V do
//   bf16        products of pairs, as the processor adds them; single ones where it has no pairs
//   partitions are merged in order: m', l' = l exp(m - m') + ..., o' likewise; out = o / l
//   sinks       scores without values, merged last: of each row that of its head
// Which rows share a tile, which keys a tile skips, and which threads work changes no bit of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"

namespace tokenmill {

constexpr int kPartition = 256;   // keys
constexpr int kKeyGroup = 16;     // tokens of a group of K
constexpr int kValueGroup = 32;   // tokens of a group of V
constexpr int kRowBlock = 32;     // rows that a kernel works on at once
constexpr int kMaxHeadSize = 576;

enum class KvFormat : int { bf16 = 0, float32 = 1, int8 = 2 };

struct CacheLayout {
  KvFormat format;
  int num_kv_heads;
  int head_size;
  int block_size;    // tokens, a multiple of kValueGroup
  int value_offset;  // values are those of the key from here on, a multiple of 16; -1: stored apart

  bool stores_values() const { return value_offset < 0; }
  int value_size() const { return stores_values() ? head_size : head_size - value_offset; }
  int value_bytes() const {
    return format == KvFormat::bf16 ? 2 : format == KvFormat::float32 ? 4 : 1;
  }
  // What a token takes in K or in V of one head.
  std::int64_t token_bytes() const {
    return std::int64_t{head_size} * value_bytes() +
           (format == KvFormat::int8 ? std::int64_t{sizeof(float)} : 0);
  }
  std::int64_t part_bytes() const { return block_size * token_bytes(); }
  std::int64_t block_bytes() const {
    return (stores_values() ? 2 : 1) * num_kv_heads * part_bytes();
  }
  std::int64_t key_group(int block, int kv_head, int offset) const {
    return block * block_bytes() + kv_head * part_bytes() +
           offset / kKeyGroup * kKeyGroup * token_bytes();
  }
  // Where values are stored.
  std::int64_t value_group(int block, int kv_head, int offset) const {
    return block * block_bytes() + (num_kv_heads + kv_head) * part_bytes() +
           offset / kValueGroup * kValueGroup * token_bytes();
  }
};

// Rows of activations, one a token.
struct TokenRows {
  void* data;
  std::int64_t stride;  // values between tokens
  bool is_bf16;         // else float32
};

// One step's batch, as in attention/backend.py.
struct StepTables {
  int num_reqs;
  const std::int32_t* query_start_loc;  // [num_reqs + 1]
  const std::int32_t* seq_lens;         // [num_reqs]
  const std::int32_t* block_table;      // [num_reqs, max_blocks]
  std::int64_t block_table_stride;
};

struct AttentionShape {
  CacheLayout cache;
  int num_heads;
  float scale;
  float soft_cap;  // 0: none
  int window;      // tokens a query sees, itself included; 0: all
  bool causal;

  int group_size() const { return num_heads / cache.num_kv_heads; }
};

// One layer's attention.
struct AttentionCall {
  AttentionShape shape;
  const std::uint8_t* cache;
  TokenRows queries;  // [num_tokens, num_heads * head_size]
  TokenRows out;      // [num_tokens, num_heads * value_size]; must not overlap
  const float* sinks;  // [num_heads]; null: none
  StepTables tables;  // set by `attention`
};

// Rows of a request are numbered query * group_size + head of the group.
struct AttentionTask {
  int request;
  int kv_head_begin, kv_head_end;
  int row_begin, row_end;
  // The rest is for the part of a block of rows whose partitions are shared out among tasks.
  int partition_begin, partition_end;
  int first_partial;  // where the results of these partitions go; -1: not shared out
};

// The end of a block that was shared out.
struct MergeTask {
  int request;
  int kv_head;
  int row_begin, row_end;
  int first_partial, num_partials;
};

// A partial: m [kRowBlock], l [kRowBlock], o [kRowBlock][value_size].
constexpr std::int64_t partial_floats(int value_size) {
  return 2 * kRowBlock + std::int64_t{kRowBlock} * value_size;
}

// The keys that a query sees, as positions in its request.
struct KeyRange {
  int begin, end;
};

static inline KeyRange visible_keys(const AttentionShape& shape, int query_len, int seq_len,
                                    int query) {
  const int position = seq_len - query_len + query;
  const int begin = shape.window > 0 ? position - shape.window + 1 : 0;
  return {begin > 0 ? begin : 0, shape.causal ? position + 1 : seq_len};
}

// Rotation and cache write of a step's tokens.
struct KvWrite {
  CacheLayout cache;
  std::uint8_t* blocks;
  int num_tokens;
  int num_heads;
  TokenRows queries;      // [num_tokens, num_heads * head_size]; data may be null: no queries
  TokenRows keys;         // [num_tokens, num_kv_heads * head_size]
  TokenRows values;       // the same; data is null where they are parts of keys
  TokenRows out_queries;  // rotated queries
  const std::int64_t* slots;      // [num_tokens]; negative: the token is not kept
  const std::int64_t* positions;  // [num_tokens]
  const float* cos;               // [positions, rotary_dim / 2]; null: no rotation
  const float* sin;
  int rotary_dim;
};

void write_kv(const KvWrite& call);

// ---------------------------------------------------------------------------------------------
// What an instruction set provides.

// The task to be done is tasks[at]; tasks[at + step], ... are those that the thread most likely
// takes next.
struct TaskQueue {
  const AttentionTask* tasks;
  int count, at, step;
};

using AttentionKernel = void (*)(const AttentionCall&, const TaskQueue&, float* partials);

void attention_amx(const AttentionCall&, const TaskQueue&, float* partials);
void attention_avx512(const AttentionCall&, const TaskQueue&, float* partials);
void attention_portable(const AttentionCall&, const TaskQueue&, float* partials);
void attention_avx2(const AttentionCall&, const TaskQueue&, float* partials);
void attention_dotprod(const AttentionCall&, const TaskQueue&, float* partials);
void attention_i8mm(const AttentionCall&, const TaskQueue&, float* partials);
void merge_partials_avx512(const AttentionCall&, const MergeTask&, const float* partials);
void merge_partials_portable(const AttentionCall&, const MergeTask&, const float* partials);
void merge_partials_avx2(const AttentionCall&, const MergeTask&, const float* partials);
void write_kv_avx512(const KvWrite&, int token_begin, int token_end);
void write_kv_portable(const KvWrite&, int token_begin, int token_end);
void write_kv_avx2(const KvWrite&, int token_begin, int token_end);

}  // namespace tokenmill
