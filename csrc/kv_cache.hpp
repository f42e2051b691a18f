// The paged KV cache of one model: a pool of blocks, each holding block_size tokens of one request in all
// layers, so that a request takes no more pages of memory than it fills.
//
//   block   [num_layers] of keys, then values
//   keys    [num_kv_heads][key_rows][block_size]       token-minor: 16 tokens' scores at a time
//   values  [num_kv_heads][block_size][value_stride]   dim-minor, rows padded with zeros
//
// Where elements are int8, a token's keys of a head share one scale and its values another, which depend on
// that token alone. Eight rows behind the keys of a head hold them, so that what fetches keys brings them
// too: float [block_size] of the keys, then of the values. And elements lie in pairs, which one instruction
// multiplies and adds: of keys, two dimensions of a token beside each other, of values, two tokens' same
// dimension:
//
//   keys    [num_kv_heads][key_rows / 2][block_size][2]
//   values  [num_kv_heads][block_size / 2][value_stride][2]
//
// Example, block_size 32: position 70 of a request is token 6 of block block_table[2].
#pragma once

#include <cstddef>
#include <cstdint>

#include "pages_ahead.hpp"

namespace everystop {

// An IEEE 754 binary16 number, stored only.
struct Half {
  uint16_t bits;
};

enum class KvType { float32, float16, int8 };

struct KvLayout {
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  KvType type;               // elements are float, Half or int8_t
  int64_t block_stride = 0;  // elements from a block to the next, of all layers; set by KvCache

  bool is_integer() const { return type == KvType::int8; }
  // Without scales; an odd head_dim has a row of zeros more where keys lie in pairs.
  int64_t unscaled_key_rows() const { return is_integer() ? (head_dim + 1) / 2 * 2 : head_dim; }
  int64_t key_rows() const { return unscaled_key_rows() + (is_integer() ? 8 : 0); }
  int64_t value_stride() const { return (head_dim + 15) / 16 * 16; }
  int64_t element_bytes() const { return type == KvType::float32 ? 4 : type == KvType::float16 ? 2 : 1; }
  // Of dimension d of token t, from the first key of a head in a block.
  int64_t key_index(int64_t d, int64_t t) const {
    return is_integer() ? (d / 2 * block_size + t) * 2 + d % 2 : d * block_size + t;
  }
  // The same of its values, from the first one.
  int64_t value_index(int64_t t, int64_t d) const {
    return is_integer() ? (t / 2 * value_stride() + d) * 2 + t % 2 : t * value_stride() + d;
  }
  int64_t key_block_elements() const { return num_kv_heads * key_rows() * block_size; }
  int64_t value_block_elements() const { return num_kv_heads * block_size * value_stride(); }
  int64_t bytes_per_layer_block() const {
    return (key_block_elements() + value_block_elements()) * element_bytes();
  }
};

class KvCache {
 public:
  // Reserves the pool, zeroed; its pages are taken from the system ahead of their use. Throws
  // std::invalid_argument for a layout it cannot serve and std::bad_alloc when the system refuses the memory.
  KvCache(const KvLayout& layout, int64_t num_layers, int64_t num_blocks);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvLayout& layout() const { return layout_; }
  int64_t num_blocks() const { return num_blocks_; }
  // Of block 0; the others lie block_stride apart.
  void* keys(int64_t layer) const { return data_ + layer * layout_.bytes_per_layer_block(); }
  void* values(int64_t layer) const {
    return data_ + layer * layout_.bytes_per_layer_block() +
           layout_.key_block_elements() * layout_.element_bytes();
  }

  // The blocks up to this one are about to be written.
  void reach(int64_t block) { ahead_.reach(static_cast<size_t>((block + 1) * block_bytes_)); }

  // Copies keys and values of all layers from one block to another.
  void copy_block(int64_t source, int64_t destination);

 private:
  KvLayout layout_;
  int64_t num_blocks_;
  int64_t block_bytes_;
  size_t total_bytes_;
  uint8_t* data_;
  PagesAhead ahead_;
};

}  // namespace everystop
