#include "kv_cache.hpp"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace everystop {
namespace {

constexpr size_t kLeadBytes = 64u << 20;  // a second of the quickest prefill fills less

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

uint8_t* reserve(size_t num_bytes) {
  void* data =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, num_bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(data);
}

KvLayout checked(KvLayout layout, int64_t num_layers, int64_t num_blocks) {
  check_layout(layout, num_layers, num_blocks);
  layout.block_stride = num_layers * (layout.key_block_elements() + layout.value_block_elements());
  return layout;
}

}  // namespace

KvCache::KvCache(const KvLayout& layout, int64_t num_layers, int64_t num_blocks)
    : layout_(checked(layout, num_layers, num_blocks)),
      num_blocks_(num_blocks),
      block_bytes_(layout_.block_stride * layout_.element_bytes()),
      total_bytes_(static_cast<size_t>(num_blocks * block_bytes_)),
      data_(reserve(total_bytes_)),
      ahead_(data_, total_bytes_, kLeadBytes) {}

KvCache::~KvCache() {
  ahead_.stop();
  munmap(data_, total_bytes_);
}

void KvCache::copy_block(int64_t source, int64_t destination) {
  std::memcpy(data_ + destination * block_bytes_, data_ + source * block_bytes_,
              static_cast<size_t>(block_bytes_));
}

}  // namespace everystop
