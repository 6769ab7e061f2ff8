#include "block_formats.h"

#include <cmath>

namespace tokenmill {
namespace {

constexpr int kHalfGroup = kStep / 2;
constexpr float kMostHalf = 65504.0f;  // the largest fp16

fp16 read_half(const std::uint8_t* data) {
  fp16 half;
  std::memcpy(&half, data, sizeof half);
  return half;
}

float read_float(const std::uint8_t* data) { return fp16_to_float(read_half(data)); }

// Scales of a layout are fp16; one that is too large for it becomes the largest.
fp16 to_scale(float value) {
  return float_to_fp16(value > kMostHalf ? kMostHalf : value < -kMostHalf ? -kMostHalf : value);
}

// Within bounds, to the nearest, ties to even; a NaN is the lower bound. Bounds are below 2^22: the
// addition leaves the integer in the low bits. Written so that loops of it become vectors.
inline int round_within(float value, float least, float most) {
  value = value > least ? value : least;
  value = value < most ? value : most;
  return __builtin_bit_cast(int, value + 12582912.0f) - 0x4b400000;
}

// Whole numbers come to a group's bytes at the end: a compiler has to assume that writing bytes
// changes any other values.
inline void store_codes(const int* whole, int count, std::uint8_t* codes) {
  for (int j = 0; j < count; ++j) codes[j] = static_cast<std::uint8_t>(whole[j]);
}

// Eight values at a time, so that the loops become vectors.
constexpr int kLanes = 8;

struct Reach {
  float least, most;
};

Reach range_of(const float* values) {
  float least[kLanes], most[kLanes];
  for (int i = 0; i < kLanes; ++i) least[i] = most[i] = values[i];
  for (int j = kLanes; j < kStep; j += kLanes)
    for (int i = 0; i < kLanes; ++i) {
      least[i] = values[j + i] < least[i] ? values[j + i] : least[i];
      most[i] = values[j + i] > most[i] ? values[j + i] : most[i];
    }
  for (int i = 1; i < kLanes; ++i) {
    least[0] = least[i] < least[0] ? least[i] : least[0];
    most[0] = most[i] > most[0] ? most[i] : most[0];
  }
  return {least[0], most[0]};
}

template <class F>
float sum_of(const float* values, const F& term) {
  float sums[kLanes] = {};
  for (int j = 0; j < kStep; j += kLanes)
    for (int i = 0; i < kLanes; ++i) sums[i] += term(values[j + i]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

// ---- Blocks of 32 values, which keep their own codes and scales -------------------------------

// Value j < 16 has its low bits in the lower half of byte j, value j + 16 in the upper half.
void read_nibbles(const std::uint8_t* bytes, std::uint8_t* codes) {
  for (int j = 0; j < kHalfGroup; ++j) {
    codes[j] = bytes[j] & 15;
    codes[j + kHalfGroup] = bytes[j] >> 4;
  }
}

void add_fifth_bits(const std::uint8_t* bytes, int zero, std::uint8_t* codes) {
  std::uint32_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  for (int j = 0; j < kStep; ++j)
    codes[j] = static_cast<std::uint8_t>((codes[j] | (bits >> j & 1u) << 4) - zero);
}

void read_q4_0(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 18;
  out.scale = read_half(block);
  read_nibbles(block + 2, out.codes);
}

void read_q4_1(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 20;
  out.scale = read_half(block);
  out.minimum = read_half(block + 2);
  read_nibbles(block + 4, out.codes);
}

void read_q5_0(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 22;
  out.scale = read_half(block);
  read_nibbles(block + 6, out.codes);
  add_fifth_bits(block + 2, 16, out.codes);
}

void read_q5_1(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 24;
  out.scale = read_half(block);
  out.minimum = read_half(block + 2);
  read_nibbles(block + 8, out.codes);
  add_fifth_bits(block + 4, 0, out.codes);
}

void read_q8_0(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 34;
  out.scale = read_half(block);
  std::memcpy(out.codes, block + 2, kStep);
}

void read_iq4_nl(const std::uint8_t* row, int group, ColumnGroup& out) {
  read_q4_0(row, group, out);  // the same bytes; codes are indices of a table
}

void read_mxfp4(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group * 17;
  // The scale is a power of two, halved here since the table holds doubled values.
  out.scale = to_scale(std::ldexp(1.0f, int{block[0]} - 128));
  read_nibbles(block + 1, out.codes);
}

// ---- Blocks of 256 values: d (and dmin) in fp16 times a small integer for each group ----------

// Six-bit scale and minimum of a group of Q4_K and Q5_K; see quantization/dequantize.py.
void read_k_scales(const std::uint8_t* block, int g, ColumnGroup& out) {
  const std::uint8_t* packed = block + 4;
  int scale, minimum;
  if (g < 4) {
    scale = packed[g] & 63;
    minimum = packed[g + 4] & 63;
  } else {
    scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
    minimum = (packed[g + 4] >> 4) | (packed[g] >> 6) << 4;
  }
  out.scale = to_scale(read_float(block) * static_cast<float>(scale));
  out.minimum = to_scale(-(read_float(block + 2) * static_cast<float>(minimum)));
}

void read_q4_k(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 144;
  const int g = group % 8, shift = g % 2 * 4;
  read_k_scales(block, g, out);
  const std::uint8_t* bytes = block + 16 + g / 2 * kStep;
  for (int j = 0; j < kStep; ++j) out.codes[j] = bytes[j] >> shift & 15;
}

void read_q5_k(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 176;
  const int g = group % 8, shift = g % 2 * 4;
  read_k_scales(block, g, out);
  const std::uint8_t* bytes = block + 48 + g / 2 * kStep;
  const std::uint8_t* fifth = block + 16;
  for (int j = 0; j < kStep; ++j)
    out.codes[j] = static_cast<std::uint8_t>((bytes[j] >> shift & 15) | (fifth[j] >> g & 1) << 4);
}

void read_iq4_xs(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 136;
  const int g = group % 8;
  std::uint16_t high;
  std::memcpy(&high, block + 2, sizeof high);
  const int scale = (block[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4;
  out.scale = to_scale(read_float(block) * static_cast<float>(scale - 32));
  read_nibbles(block + 8 + g * kHalfGroup, out.codes);
}

// ---- Blocks with a scale for 16 values: two of these become one group -------------------------

int largest_magnitude(const std::int8_t* codes) {
  int most = 0;
  for (int j = 0; j < kHalfGroup; ++j) {
    const int magnitude = codes[j] < 0 ? -codes[j] : codes[j];
    if (magnitude > most) most = magnitude;
  }
  return most;
}

// Codes on two steps, value = steps[half] * code, to int8 on one. The half with the larger values
// keeps its values, as a multiple of its codes; the other is rounded to the nearest.
void join_halves(const std::int8_t* codes, const float (&steps)[2], ColumnGroup& out) {
  const int most[2] = {largest_magnitude(codes), largest_magnitude(codes + kHalfGroup)};
  const int kept = std::fabs(steps[1]) * static_cast<float>(most[1]) >
                   std::fabs(steps[0]) * static_cast<float>(most[0]);
  if (most[kept] == 0 || steps[kept] == 0.0f) {
    out.scale = 0;
    std::memset(out.codes, 0, kStep);
    return;
  }
  const int multiple = 127 / most[kept];
  int rounded[kHalfGroup], exact[kHalfGroup];
  out.scale = to_scale(steps[kept] / static_cast<float>(multiple));
  const float scale = fp16_to_float(out.scale);
  const float ratio = scale == 0.0f ? 0.0f : steps[1 - kept] / scale;
  const std::int8_t* own = codes + kept * kHalfGroup;
  const std::int8_t* other = codes + (1 - kept) * kHalfGroup;
  for (int j = 0; j < kHalfGroup; ++j) {
    exact[j] = own[j] * multiple;
    rounded[j] = round_within(static_cast<float>(other[j]) * ratio, -127.0f, 127.0f);
  }
  store_codes(exact, kHalfGroup, out.codes + kept * kHalfGroup);
  store_codes(rounded, kHalfGroup, out.codes + (1 - kept) * kHalfGroup);
}

void read_q6_k(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 210;
  const int half = group % 8 / 4, run = group % 4;
  const std::uint8_t* low = block + half * 64 + run % 2 * kStep;
  const std::uint8_t* high = block + 128 + half * kStep;
  const std::uint8_t* scales = block + 192 + group % 8 * 2;
  const float d = read_float(block + 208);
  std::int8_t codes[kStep];
  for (int j = 0; j < kStep; ++j)
    codes[j] = static_cast<std::int8_t>(
        ((low[j] >> (run / 2 * 4) & 15) | (high[j] >> (2 * run) & 3) << 4) - 32);
  join_halves(codes, {d * static_cast<std::int8_t>(scales[0]),
                      d * static_cast<std::int8_t>(scales[1])}, out);
}

// Six-bit scale number i of 16 in the twelve bytes of Q3_K, less 32.
int q3_k_scale(const std::uint8_t* packed, int i) {
  const int low = packed[i % 8] >> (i / 8 * 4) & 15;
  const int high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
  return (low | high << 4) - 32;
}

void read_q3_k(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 110;
  const int half = group % 8 / 4, run = group % 4, g = group % 8;
  const std::uint8_t* low = block + 32 + half * kStep;
  const float d = read_float(block + 108);
  std::int8_t codes[kStep];
  for (int j = 0; j < kStep; ++j)
    codes[j] = static_cast<std::int8_t>((low[j] >> (2 * run) & 3) - (block[j] >> g & 1 ? 0 : 4));
  const std::uint8_t* scales = block + 96;
  join_halves(codes, {d * static_cast<float>(q3_k_scale(scales, 2 * g)),
                      d * static_cast<float>(q3_k_scale(scales, 2 * g + 1))}, out);
}

void read_q2_k(const std::uint8_t* row, int group, ColumnGroup& out) {
  const std::uint8_t* block = row + group / 8 * 84;
  const int half = group % 8 / 4, run = group % 4;
  const std::uint8_t* scales = block + group % 8 * 2;
  const std::uint8_t* bytes = block + 16 + half * kStep;
  const float d = read_float(block + 80), dmin = read_float(block + 82);
  float values[kStep];
  for (int part = 0; part < 2; ++part) {
    const float step = d * static_cast<float>(scales[part] & 15);
    const float offset = dmin * static_cast<float>(scales[part] >> 4);
    for (int j = part * kHalfGroup; j < (part + 1) * kHalfGroup; ++j)
      values[j] = step * static_cast<float>(bytes[j] >> (2 * run) & 3) - offset;
  }
  quantize_group_8bit(values, out);
}

}  // namespace

BlockSize block_size(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return {32, 18};
    case BlockType::q4_1: return {32, 20};
    case BlockType::q5_0: return {32, 22};
    case BlockType::q5_1: return {32, 24};
    case BlockType::q8_0: return {32, 34};
    case BlockType::iq4_nl: return {32, 18};
    case BlockType::mxfp4: return {32, 17};
    case BlockType::q2_k: return {256, 84};
    case BlockType::q3_k: return {256, 110};
    case BlockType::q4_k: return {256, 144};
    case BlockType::q5_k: return {256, 176};
    case BlockType::q6_k: return {256, 210};
    case BlockType::iq4_xs: return {256, 136};
  }
  return {0, 0};
}

GroupReader group_reader(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return read_q4_0;
    case BlockType::q4_1: return read_q4_1;
    case BlockType::q5_0: return read_q5_0;
    case BlockType::q5_1: return read_q5_1;
    case BlockType::q8_0: return read_q8_0;
    case BlockType::iq4_nl: return read_iq4_nl;
    case BlockType::mxfp4: return read_mxfp4;
    case BlockType::q2_k: return read_q2_k;
    case BlockType::q3_k: return read_q3_k;
    case BlockType::q4_k: return read_q4_k;
    case BlockType::q5_k: return read_q5_k;
    case BlockType::q6_k: return read_q6_k;
    case BlockType::iq4_xs: return read_iq4_xs;
  }
  return nullptr;
}

void quantize_group_8bit(const float* values, ColumnGroup& out) {
  const Reach range = range_of(values);
  const float most = range.most > -range.least ? range.most : -range.least;
  out.scale = to_scale(most / 127.0f);
  out.minimum = 0;
  const float scale = fp16_to_float(out.scale);
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  int codes[kStep];
  for (int j = 0; j < kStep; ++j) codes[j] = round_within(values[j] * inverse, -127.0f, 127.0f);
  store_codes(codes, kStep, out.codes);
}

void quantize_group_4bit(const float* values, ColumnGroup& out) {
  constexpr int kFits = 2;
  const Reach range = range_of(values);
  const float sum = sum_of(values, [](float value) { return value; });
  float scale = (range.most - range.least) / 15.0f, minimum = range.least;
  for (int fit = 0;; ++fit) {
    out.scale = to_scale(scale);
    out.minimum = to_scale(minimum);
    scale = fp16_to_float(out.scale);
    minimum = fp16_to_float(out.minimum);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    int whole[kStep];
    float codes[kStep], products[kStep];
    for (int j = 0; j < kStep; ++j) {
      whole[j] = round_within((values[j] - minimum) * inverse, 0.0f, 15.0f);
      codes[j] = static_cast<float>(whole[j]);
      products[j] = codes[j] * values[j];
    }
    store_codes(whole, kStep, out.codes);
    if (fit == kFits) return;
    const float codes_sum = sum_of(codes, [](float code) { return code; });
    const float squares = sum_of(codes, [](float code) { return code * code; });
    const float spread = kStep * squares - codes_sum * codes_sum;
    if (spread == 0.0f) return;
    const float fitted =
        (kStep * sum_of(products, [](float each) { return each; }) - codes_sum * sum) / spread;
    if (!(fitted > 0.0f)) return;
    scale = fitted;
    minimum = (sum - scale * codes_sum) / kStep;
  }
}

}  // namespace tokenmill
