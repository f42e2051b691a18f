#include "kv_cache.hpp"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace everystop {
namespace {

void check_layout(const KvLayout& layout, int64_t num_layers, int64_t num_blocks) {
  const int64_t size = layout.block_size;
  if (size < 16 || size > 256 || size % 16 != 0 || 256 % size != 0) {
    throw std::invalid_argument("block_size must be 16, 32, 64, 128 or 256, not " + std::to_string(size));
  }
  if (layout.num_kv_heads < 1 || layout.head_dim < 1 || num_layers < 1 || num_blocks < 1) {
    throw std::invalid_argument("the KV cache needs at least one head, dimension, layer and block");
  }
  const double bytes = static_cast<double>(layout.bytes_per_layer_block()) * static_cast<double>(num_layers) *
                       static_cast<double>(num_blocks);
  if (bytes > static_cast<double>(std::numeric_limits<int64_t>::max() / 2)) {
    throw std::invalid_argument("the KV cache would need " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

KvCache::KvCache(const KvLayout& layout, int64_t num_layers, int64_t num_blocks)
    : layout_(layout), num_layers_(num_layers), num_blocks_(num_blocks) {
  check_layout(layout, num_layers, num_blocks);
  key_bytes_ = num_blocks * layout.key_block_elements() * layout.element_bytes();
  layer_bytes_ = num_blocks * layout.bytes_per_layer_block();
  total_bytes_ = static_cast<size_t>(num_layers * layer_bytes_);
  void* data =
      mmap(nullptr, total_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, total_bytes_, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(data);
}

KvCache::~KvCache() {
  munmap(data_, total_bytes_);
}

void KvCache::copy_block(int64_t source, int64_t destination) {
  const size_t key_bytes = static_cast<size_t>(layout_.key_block_elements() * layout_.element_bytes());
  const size_t value_bytes = static_cast<size_t>(layout_.value_block_elements() * layout_.element_bytes());
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    auto* k = static_cast<uint8_t*>(keys(layer));
    auto* v = static_cast<uint8_t*>(values(layer));
    std::memcpy(k + destination * key_bytes, k + source * key_bytes, key_bytes);
    std::memcpy(v + destination * value_bytes, v + source * value_bytes, value_bytes);
  }
}

}  // namespace everystop
