#include "decoder.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "isa.hpp"
#include "rope.hpp"

namespace everystop {

namespace {

// Below this many float operations a team costs more than it saves.
constexpr int64_t kSerialCost = 20000;

// Logits of a prompt are computed so many tokens at a time at least.
constexpr int64_t kLeastLogitsRows = 16;

// With fewer attention tiles than this for each thread, their splits are shared out, as far as there is room.
constexpr int64_t kFewTiles = 6;
constexpr int64_t kMostPartials = 512;

// Layers of fewer rows wait for their own weights, and have no time to fetch anything else.
constexpr int64_t kLeastFetchingRows = 24;

// More than this of one layer would drive out of the caches what was fetched first.
constexpr int64_t kMostFetchedBytes = int64_t{8} << 20;

int64_t num_splits_of(const AttentionTile& tile) {
  return (tile.first_position + tile.num_rows - 1) / kAttentionSplit + 1;
}

int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

const DecoderKernels& decoder_kernels() {
  switch (active_isa()) {
#if defined(__x86_64__)
    case Isa::avx512vnni:
      return decoder_kernels_avx512();
    case Isa::avxvnni:
    case Isa::avx2:
      return decoder_kernels_avx2();
#endif
    default:
      return decoder_kernels_portable();
  }
}

void Decoder::FreeDeleter::operator()(void* p) const {
  std::free(p);
}

template <class T>
Decoder::Scratch<T> Decoder::allocate(int64_t count) {
  const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)) + 64, 64));
  void* p = std::aligned_alloc(64, bytes);
  if (p == nullptr) throw std::bad_alloc();
  std::memset(p, 0, bytes);
  return Scratch<T>(static_cast<T*>(p));
}

Decoder::Decoder(DecoderConfig config, DecoderWeights weights)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      kernels_(decoder_kernels()),
      team_(config_.num_threads),
      cache_({config_.num_kv_heads, config_.head_dim, config_.block_size, config_.kv_type},
             config_.num_layers, config_.num_blocks),
      logits_stride_(round_up(config_.vocab_size, 16)),
      logits_rows_(
          std::max(config_.max_num_seqs, std::min(kLeastLogitsRows, config_.max_num_batched_tokens))) {
  const DecoderConfig& c = config_;
  const int64_t t = c.max_num_batched_tokens;
  const int64_t widest = std::max({c.hidden_size, c.q_size(), c.intermediate_size});
  rows_.reserve(static_cast<size_t>(c.max_num_seqs));
  tokens_.reserve(static_cast<size_t>(t));
  tiles_.reserve(static_cast<size_t>(t * c.num_kv_heads));
  last_tiles_.reserve(static_cast<size_t>(t * c.num_kv_heads));
  logits_tokens_.reserve(static_cast<size_t>(t));
  wanted_.reserve(static_cast<size_t>(t));
  context_blocks_.reserve(
      static_cast<size_t>(kMostFetchedBytes / cache_.layout().bytes_per_layer_block() + 1));
  logprobs_.resize(static_cast<size_t>(c.max_num_seqs));
  prompt_logprobs_.reserve(static_cast<size_t>(t));
  hidden_ = allocate<float>(t * c.hidden_size);
  normed_ = allocate<float>(t * c.hidden_size);
  delta_ = allocate<float>(t * c.hidden_size);
  qkv_ = allocate<float>(t * c.qkv_size());
  attended_ = allocate<float>(t * c.q_size());
  gate_up_ = allocate<float>(t * 2 * c.intermediate_size);
  activated_ = allocate<float>(t * c.intermediate_size);
  cosines_ = allocate<float>(t * c.head_dim / 2);
  sines_ = allocate<float>(t * c.head_dim / 2);
  logits_ = allocate<float>(logits_rows_ * logits_stride_);
  activations_ = allocate<uint8_t>(static_cast<int64_t>(
      activation_bytes(c.dtype, std::max(t, c.max_num_seqs), round_up(widest, kGroupSize))));
  const int64_t attention_floats = attention_scratch_floats(cache_.layout(), c.num_heads / c.num_kv_heads);
  partials_ = allocate<float>(kMostPartials *
                              attention_partial_floats(cache_.layout(), c.num_heads / c.num_kv_heads));
  for (int thread = 0; thread < c.num_threads; ++thread) {
    attention_scratch_.push_back(allocate<float>(attention_floats));
    sampling_scratch_.emplace_back(c.num_valid_tokens);
  }
}

// ----------------------------------------------------------------------------------------- state

RequestState& Decoder::find(int64_t request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) require(false, "request " + std::to_string(request_id) + " is not on board");
  return *found->second;
}

void Decoder::take_blocks(const int32_t* blocks, int64_t count) {
  int32_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] < 0 || blocks[i] >= config_.num_blocks) {
      require(false, "block " + std::to_string(blocks[i]) + " is outside the pool of " +
                         std::to_string(config_.num_blocks));
    }
    last = std::max(last, blocks[i]);
  }
  if (last >= 0) cache_.reach(last);
}

void Decoder::admit(int64_t request_id, RequestState state) {
  const std::string name = "request " + std::to_string(request_id);
  require(requests_.count(request_id) == 0, name + " is on board already");
  require(
      state.num_prompt_tokens >= 1 && state.num_prompt_tokens <= static_cast<int64_t>(state.token_ids.size()),
      name + " has " + std::to_string(state.num_prompt_tokens) + " prompt tokens of " +
          std::to_string(state.token_ids.size()));
  require(state.num_prompt_logprobs <= kMaxLogprobs,
          name + " wants " + std::to_string(state.num_prompt_logprobs) + " log-probabilities a prompt token");
  const int64_t vocab_size = state.num_prompt_logprobs < 0 ? config_.vocab_size : config_.num_valid_tokens;
  for (const int32_t id : state.token_ids) {
    if (id >= 0 && id < vocab_size) continue;
    require(false,
            name + " has token " + std::to_string(id) + " of a vocabulary of " + std::to_string(vocab_size));
  }
  take_blocks(state.block_table.data(), static_cast<int64_t>(state.block_table.size()));
  const SamplingSettings& sampling = state.sampling;
  for (const int32_t id : sampling.stop_ids) {
    require(id >= 0 && id < config_.num_valid_tokens, name + " has stop id " + std::to_string(id));
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    require(id >= 0 && id < config_.num_valid_tokens && std::isfinite(bias),
            name + " has a logit bias for token " + std::to_string(id));
  }
  for (const std::vector<int32_t>& word : sampling.bad_words) {
    require(!word.empty(), name + " has an empty bad word");
    for (const int32_t id : word) {
      require(id >= 0 && id < config_.num_valid_tokens,
              name + " has a bad word with token " + std::to_string(id));
    }
  }
  require(sampling.allowed.empty() ||
              static_cast<int64_t>(sampling.allowed.size()) * 32 >= config_.num_valid_tokens,
          name + " has a mask of " + std::to_string(sampling.allowed.size() * 32) + " tokens");
  require(sampling.num_logprobs <= kMaxLogprobs,
          name + " wants " + std::to_string(sampling.num_logprobs) + " log-probabilities a token");
  const int64_t capacity = static_cast<int64_t>(state.block_table.size()) * config_.block_size + 1;
  state.token_ids.reserve(static_cast<size_t>(std::max<int64_t>(capacity, state.token_ids.size() + 1)));
  requests_.emplace(request_id, std::make_unique<RequestState>(std::move(state)));
}

void Decoder::set_blocks(int64_t request_id, int64_t first_index, const int32_t* blocks, int64_t count) {
  RequestState& request = find(request_id);
  take_blocks(blocks, count);
  std::vector<int32_t>& table = request.block_table;
  require(first_index >= 0 && first_index <= static_cast<int64_t>(table.size()),
          "request " + std::to_string(request_id) + " has " + std::to_string(table.size()) +
              " blocks; none can be set from index " + std::to_string(first_index));
  if (static_cast<int64_t>(table.size()) < first_index + count)
    table.resize(static_cast<size_t>(first_index + count));
  std::copy(blocks, blocks + count, table.begin() + first_index);
  request.token_ids.reserve(table.size() * static_cast<size_t>(config_.block_size) + 1);
}

void Decoder::release(int64_t request_id) {
  requests_.erase(request_id);
}

// ---------------------------------------------------------------------------------------- plan

int64_t Decoder::count_logits(const StepRow* rows, int64_t num_rows) {
  int64_t count = 0;
  for (int64_t r = 0; r < num_rows; ++r)
    count += std::max<int64_t>(0, rows[r].num_tokens - rows[r].logits_from);
  return count;
}

// Throws unless the row's tokens are known, have blocks, and fit into this step. Words are put together only
// then.
void Decoder::check_row(const StepRow& row, const RequestState& request) const {
  const int64_t end = row.start + row.num_tokens;
  const int64_t known = static_cast<int64_t>(request.token_ids.size());
  const int64_t covered = static_cast<int64_t>(request.block_table.size()) * config_.block_size;
  const bool is_sane = row.start >= 0 && row.num_tokens >= 1 && row.logits_from >= 0 &&
                       row.num_tokens <= config_.max_num_batched_tokens;
  if (is_sane && end <= known && end <= covered &&
      num_tokens_ + row.num_tokens <= config_.max_num_batched_tokens) {
    return;
  }
  const std::string name = "the row of request " + std::to_string(row.request_id);
  require(is_sane, name + " is malformed");
  require(end <= known, name + " ends at position " + std::to_string(end) + " of " + std::to_string(known) +
                            " known tokens");
  require(end <= covered, name + " ends at position " + std::to_string(end) + ", but its blocks hold " +
                              std::to_string(covered));
  require(false, "a step of more than " + std::to_string(config_.max_num_batched_tokens) + " tokens");
}

void Decoder::plan_rows(const StepRow* rows, int64_t num_rows, int64_t num_padded_rows) {
  if (num_rows > config_.max_num_seqs) {
    require(false,
            std::to_string(num_rows) + " rows in a step of at most " + std::to_string(config_.max_num_seqs));
  }
  rows_.clear();
  tokens_.clear();
  tiles_.clear();
  last_tiles_.clear();
  logits_tokens_.clear();
  wanted_.clear();
  num_tokens_ = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    StepRow row = rows[r];
    RequestState& request = find(row.request_id);
    // A finished request may have no block for its last token, where none was free.
    if (r >= num_rows - num_padded_rows) {
      const int64_t covered = static_cast<int64_t>(request.block_table.size()) * config_.block_size;
      row.start = std::min(row.start, covered - row.num_tokens);
    }
    check_row(row, request);
    add_row(row, request);
  }
}

void Decoder::add_row(const StepRow& row, RequestState& request) {
  const int64_t size = config_.block_size;
  rows_.push_back({&request, row.start, row.num_tokens, row.logits_from, num_tokens_});
  for (int64_t position = row.start; position < row.start + row.num_tokens; ++position) {
    tokens_.push_back(
        {&request, position, request.block_table[static_cast<size_t>(position / size)], position % size});
  }
  add_tiles(rows_.back(), 0, row.num_tokens, num_tokens_, tiles_);
  num_tokens_ += row.num_tokens;
}

// Tokens [from, to) of a row whose logits are wanted: all that the last layer computes. They are wanted in
// the order in which they lie in the packed axis.
void Decoder::want_logits(const PlannedRow& row, int64_t from, int64_t to) {
  const int64_t first = static_cast<int64_t>(logits_tokens_.size());
  for (int64_t i = from; i < to; ++i) logits_tokens_.push_back(row.first_token + i);
  add_tiles(row, from, to, first, last_tiles_);
}

void Decoder::want_scores(const PromptLogits& prompt) {
  const PlannedRow& row = rows_[static_cast<size_t>(prompt.row)];
  int64_t score = static_cast<int64_t>(prompt_logprobs_.size());
  prompt_logprobs_.resize(prompt_logprobs_.size() + static_cast<size_t>(prompt.count));
  for (int64_t i = prompt.from; i < prompt.from + prompt.count; ++i) {
    wanted_.push_back({prompt.row, row.start + i, score++});
  }
  want_logits(row, prompt.from, prompt.from + prompt.count);
}

// One token a row: its last.
void Decoder::want_sample(int64_t row) {
  const PlannedRow& planned = rows_[static_cast<size_t>(row)];
  wanted_.push_back({row, planned.start + planned.num_tokens - 1, kSampled});
  want_logits(planned, planned.num_tokens - 1, planned.num_tokens);
}

// Cuts tokens [from, to) of a row into attention tiles at fixed positions, so that no tile crosses a split.
// Their results go to rows `out` and up of attended_.
void Decoder::add_tiles(const PlannedRow& row, int64_t from, int64_t to, int64_t out,
                        std::vector<AttentionTile>& tiles) {
  const DecoderConfig& c = config_;
  const int64_t group = c.num_heads / c.num_kv_heads, tile_rows = attention_tile_rows(group);
  for (int64_t done = from; done < to;) {
    const int64_t position = row.start + done;
    const int64_t count = std::min(tile_rows - position % tile_rows, to - done);
    for (int64_t head = 0; head < c.num_kv_heads; ++head) {
      const int64_t offset = head * group * c.head_dim;
      tiles.push_back({row.request->block_table.data(), position, count, head, group,
                       1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                       qkv_.get() + (row.first_token + done) * c.qkv_size() + offset, c.qkv_size(),
                       attended_.get() + (out + done - from) * c.q_size() + offset, c.q_size()});
    }
    done += count;
  }
}

// The cache of many requests is larger than what the processor keeps of it, and while layers compute the bus
// to memory has time: so they fetch what the next attention reads.
void Decoder::plan_fetches() {
  context_blocks_.clear();
  if (!fetching_ || num_tokens_ < kLeastFetchingRows) return;
  const size_t most = static_cast<size_t>(kMostFetchedBytes / cache_.layout().bytes_per_layer_block());
  for (const PlannedRow& row : rows_) {
    const std::vector<int32_t>& table = row.request->block_table;
    const int64_t count = std::min<int64_t>({(row.start + config_.block_size - 1) / config_.block_size,
                                             static_cast<int64_t>(table.size()),
                                             static_cast<int64_t>(most - context_blocks_.size())});
    context_blocks_.insert(context_blocks_.end(), table.begin(), table.begin() + count);
  }
}

// What a projection fetches of the keys and values that `layer` attends to, by its share of the work between
// two attentions.
Upcoming Decoder::upcoming_keys(int64_t layer, int64_t StepTimes::* part) const {
  const DecoderConfig& c = config_;
  const int64_t count = static_cast<int64_t>(context_blocks_.size());
  if (count == 0 || layer == c.num_layers) return {};
  const int64_t o = c.q_size(), gate_up = o + 2 * c.intermediate_size, down = gate_up + c.intermediate_size,
                all = down + c.qkv_size();
  int64_t from = down, to = all;
  if (part == &StepTimes::o) from = 0, to = o;
  if (part == &StepTimes::gate_up) from = o, to = gate_up;
  if (part == &StepTimes::down) from = gate_up, to = down;
  if (part == &StepTimes::lm_head) from = 0, to = down;  // for the next step, which mostly has the same rows
  const int64_t first = from * count / all, last = to * count / all;
  return {static_cast<const uint8_t*>(cache_.keys(layer)), context_blocks_.data() + first, last - first,
          cache_.layout().block_stride * cache_.layout().element_bytes(),
          cache_.layout().bytes_per_layer_block()};
}

void Decoder::copy_blocks(const int32_t* copies, int64_t num_copies) {
  take_blocks(copies, 2 * num_copies);
  for (int64_t i = 0; i < num_copies; ++i) cache_.copy_block(copies[2 * i], copies[2 * i + 1]);
}

// ------------------------------------------------------------------------------------- forward

// Runs body(row, thread) for rows that cost about `cost` operations each, in shares large enough to be worth
// one.
template <class F>
void Decoder::for_rows(int64_t num_rows, int64_t cost, F&& body) {
  // Keys and values of neighbours share lines of the cache, which two threads that write them would fight
  // over.
  const int64_t least = std::min<int64_t>(32, num_rows / (2 * team_.size()));
  const int64_t rows_per_share = std::max({int64_t{1}, least, kSerialCost / 2 / std::max<int64_t>(cost, 1)});
  if (num_rows * cost <= kSerialCost || rows_per_share >= num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) body(row, 0);
    return;
  }
  team_.run((num_rows + rows_per_share - 1) / rows_per_share, [&](int64_t share, int thread) {
    const int64_t end = std::min(num_rows, (share + 1) * rows_per_share);
    for (int64_t row = share * rows_per_share; row < end; ++row) body(row, thread);
  });
}

void Decoder::note(int64_t StepTimes::* part) {
  if (!profiling_) return;
  const int64_t now = now_ns();
  times_.*part += now - last_note_;
  last_note_ = now;
}

void Decoder::project(const Projection& p) {
  if (mutant_ == Mutant::none || mutant_ == Mutant::scale_over_tokens) return project_exactly(p);
  p.make_rows(0, p.m);
  Projection made = p;
  made.make_rows = {};
  if (mutant_ == Mutant::quantize_over_batch) return project_quantized_over_batch(made);
  project_split_by_rows(made);
}

void Decoder::project_exactly(const Projection& p) {
  prepare_activations(config_.dtype, p.x, p.m, p.k, p.k, activations_.get(), team_, p.make_rows);
  note(&StepTimes::prepare);
  linear_forward(config_.dtype, p.weights, activations_.get(), p.m, p.n, p.k, p.bias, p.y, p.ldy, team_,
                 p.upcoming, p.next);
  note(p.part);
}

void Decoder::embed() {
  const int64_t d = config_.hidden_size, half = config_.head_dim / 2;
  for_rows(num_tokens_, d + half * 40, [&](int64_t t, int) {
    const PlannedToken& token = tokens_[static_cast<size_t>(t)];
    const int64_t id = token.request->token_ids[static_cast<size_t>(token.position)];
    if (config_.dtype == Dtype::int8) {
      kernels_.widen(static_cast<const Half*>(weights_.embed_tokens) + id * d, d, hidden_.get() + t * d);
    } else {
      std::memcpy(hidden_.get() + t * d, static_cast<const float*>(weights_.embed_tokens) + id * d,
                  static_cast<size_t>(d) * sizeof(float));
    }
    rope_angles(token.position, config_.inv_freq.data(), half, config_.rope_factor, cosines_.get() + t * half,
                sines_.get() + t * half);
  });
  note(&StepTimes::embed);
}

// normed = rms_norm(hidden += delta) of some rows; delta may be null.
void Decoder::normalize(int64_t first, int64_t count, const float* delta, const float* weight) {
  const int64_t d = config_.hidden_size;
  for (int64_t t = first; t < first + count; ++t) {
    float* x = hidden_.get() + t * d;
    if (delta == nullptr) {
      kernels_.rms_norm(x, weight, d, config_.rms_norm_eps, normed_.get() + t * d);
    } else {
      kernels_.add_rms_norm(x, delta + t * d, weight, d, config_.rms_norm_eps, normed_.get() + t * d);
    }
  }
}

// Query and key norms, rotation, and the write of keys and values: all rows of a layer, before any of them
// attends.
void Decoder::rotate_and_store(int64_t layer) {
  const DecoderConfig& c = config_;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t half = c.head_dim / 2;
  for_rows(num_tokens_, c.qkv_size() * 2, [&](int64_t t, int) {
    float* x = qkv_.get() + t * c.qkv_size();
    for (int64_t head = 0; head < c.num_heads + c.num_kv_heads; ++head) {
      float* h = x + head * c.head_dim;
      const float* norm = head < c.num_heads ? w.q_norm : w.k_norm;
      if (norm != nullptr) kernels_.rms_norm(h, norm, c.head_dim, c.rms_norm_eps, h);
      kernels_.rotate_half(h, cosines_.get() + t * half, sines_.get() + t * half, half);
      if (cache_.layout().is_integer()) kernels_.spread(h, c.head_dim);  // both sides of a score
    }
    store(tokens_[static_cast<size_t>(t)], layer, x + c.q_size(), x + c.q_size() + c.kv_size());
  });
  if (mutant_ == Mutant::scale_over_tokens) store_on_one_grid(layer);
  note(&StepTimes::rope);
}

void Decoder::store(const PlannedToken& token, int64_t layer, const float* keys, const float* values) {
  kernels_.write_token(cache_.layout(), cache_.keys(layer), cache_.values(layer), token.block, token.offset,
                       keys, values);
}

void Decoder::attend(int64_t layer, const std::vector<AttentionTile>& tiles) {
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  if (num_tiles < kFewTiles * team_.size() && attend_by_splits(layer, tiles)) return;
  team_.run(num_tiles, [&](int64_t i, int thread) {
    const int64_t likely_next = i + team_.size();
    kernels_.attend(cache_.layout(), cache_.keys(layer), cache_.values(layer), tiles[static_cast<size_t>(i)],
                    likely_next < num_tiles ? &tiles[static_cast<size_t>(likely_next)] : nullptr,
                    attention_scratch_[static_cast<size_t>(thread)].get());
  });
  note(&StepTimes::attention);
}

// Few tiles over long contexts leave threads idle: shares out their splits, and merges them in order, which
// gives the same bits. False where it is not worth it.
bool Decoder::attend_by_splits(int64_t layer, const std::vector<AttentionTile>& tiles) {
  int64_t num_splits = 0;
  for (const AttentionTile& tile : tiles) num_splits += num_splits_of(tile);
  if (team_.size() == 1 || num_splits < 2 * static_cast<int64_t>(tiles.size()) || num_splits > kMostPartials)
    return false;
  const int64_t floats = attention_partial_floats(cache_.layout(), config_.num_heads / config_.num_kv_heads);
  team_.run(num_splits, [&](int64_t i, int thread) {
    int64_t split = i;
    const AttentionTile* tile = tiles.data();
    for (; split >= num_splits_of(*tile); ++tile) split -= num_splits_of(*tile);
    kernels_.attend_partly(cache_.layout(), cache_.keys(layer), cache_.values(layer), *tile, split,
                           attention_scratch_[static_cast<size_t>(thread)].get(),
                           partials_.get() + i * floats);
  });
  float* partials = partials_.get();
  for (const AttentionTile& tile : tiles) {
    kernels_.merge_partials(cache_.layout(), tile, partials, floats);
    partials += num_splits_of(tile) * floats;
  }
  note(&StepTimes::attention);
  return true;
}

void Decoder::run_attention_block(int64_t layer) {
  const DecoderConfig& c = config_;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const auto norm = [&](int64_t first, int64_t count) {
    normalize(first, count, layer == 0 ? nullptr : delta_.get(), w.attn_norm);
  };
  project({w.qkv,
           normed_.get(),
           num_live_,
           c.qkv_size(),
           c.hidden_size,
           w.qkv_bias,
           qkv_.get(),
           c.qkv_size(),
           &StepTimes::qkv,
           upcoming_keys(layer, &StepTimes::qkv),
           RowMaker(norm),
           {w.o, c.hidden_size, c.q_size()}});
  rotate_and_store(layer);
  if (layer + 1 == c.num_layers) {
    keep_wanted();
    attend(layer, last_tiles_);
  } else {
    attend(layer, tiles_);
  }
  project({w.o,
           attended_.get(),
           num_live_,
           c.hidden_size,
           c.q_size(),
           nullptr,
           delta_.get(),
           c.hidden_size,
           &StepTimes::o,
           upcoming_keys(layer + 1, &StepTimes::o),
           {},
           {w.gate_up, 2 * c.intermediate_size, c.hidden_size}});
}

// Drops tokens whose logits nobody wants: of them, only keys and values outlive the step.
void Decoder::keep_wanted() {
  const int64_t d = config_.hidden_size;
  num_live_ = static_cast<int64_t>(logits_tokens_.size());
  for (int64_t i = 0; i < num_live_; ++i) {
    const int64_t t = logits_tokens_[static_cast<size_t>(i)];
    if (t != i)
      std::memcpy(hidden_.get() + i * d, hidden_.get() + t * d, static_cast<size_t>(d) * sizeof(float));
  }
}

void Decoder::run_mlp_block(int64_t layer) {
  const DecoderConfig& c = config_;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t inner = c.intermediate_size;
  const auto norm = [&](int64_t first, int64_t count) { normalize(first, count, delta_.get(), w.mlp_norm); };
  project({w.gate_up,
           normed_.get(),
           num_live_,
           2 * inner,
           c.hidden_size,
           nullptr,
           gate_up_.get(),
           2 * inner,
           &StepTimes::gate_up,
           upcoming_keys(layer + 1, &StepTimes::gate_up),
           RowMaker(norm),
           {w.down, c.hidden_size, inner}});
  const auto activate = [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const float* gate = gate_up_.get() + t * 2 * inner;
      kernels_.silu_mul(gate, gate + inner, inner, activated_.get() + t * inner);
    }
  };
  project({w.down, activated_.get(), num_live_, c.hidden_size, inner, nullptr, delta_.get(), c.hidden_size,
           &StepTimes::down, upcoming_keys(layer + 1, &StepTimes::down), RowMaker(activate),
           layer + 1 == c.num_layers ? NextLayer{weights_.lm_head, c.vocab_size, c.hidden_size}
                                     : NextLayer{weights_.layers[static_cast<size_t>(layer) + 1].qkv,
                                                 c.qkv_size(), c.hidden_size}});
}

void Decoder::run_layers() {
  num_live_ = num_tokens_;
  plan_fetches();
  embed();
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    run_attention_block(layer);
    run_mlp_block(layer);
  }
}

// Logits of wanted tokens [first, first + count) into the first rows of logits_.
void Decoder::compute_logits(int64_t first, int64_t count) {
  const int64_t d = config_.hidden_size;
  const auto norm = [&](int64_t row, int64_t num_rows) {
    for (int64_t i = row; i < row + num_rows; ++i) {
      kernels_.add_rms_norm(hidden_.get() + (first + i) * d, delta_.get() + (first + i) * d, weights_.norm, d,
                            config_.rms_norm_eps, normed_.get() + i * d);
    }
  };
  project({weights_.lm_head,
           normed_.get(),
           count,
           config_.vocab_size,
           d,
           nullptr,
           logits_.get(),
           logits_stride_,
           &StepTimes::lm_head,
           {},
           RowMaker(norm)});
}

void Decoder::forward(const StepRow* rows, int64_t num_rows, float* logits) {
  plan_rows(rows, num_rows, 0);
  if (num_tokens_ == 0) return;
  for (const PlannedRow& row : rows_) want_logits(row, row.logits_from, row.num_tokens);
  last_note_ = profiling_ ? now_ns() : 0;
  run_layers();
  const int64_t total = static_cast<int64_t>(logits_tokens_.size()), n = config_.num_valid_tokens;
  for (int64_t first = 0; first < total; first += logits_rows_) {
    const int64_t count = std::min(logits_rows_, total - first);
    compute_logits(first, count);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(logits + (first + i) * n, logits_.get() + i * logits_stride_,
                  static_cast<size_t>(n) * sizeof(float));
    }
  }
}

// ---------------------------------------------------------------------------------------- step

// Throws unless each of `prompts` asks for prompt tokens with a next one, of a request that wants them
// scored.
void Decoder::check_prompts(const PromptLogits* prompts, int64_t num_prompts) const {
  for (int64_t i = 0; i < num_prompts; ++i) {
    const PromptLogits& p = prompts[i];
    const bool is_row =
        p.row >= 0 && p.row < static_cast<int64_t>(rows_.size()) && (i == 0 || prompts[i - 1].row < p.row);
    if (!is_row) require(false, "prompts are scored in the order of their rows, once each");
    const PlannedRow& row = rows_[static_cast<size_t>(p.row)];
    const int64_t end =
        std::min(row.num_tokens, row.logits_from);  // of the tokens whose logits nobody samples
    const bool has_tokens = p.from >= 0 && p.count >= 1 && p.count <= end - p.from &&
                            row.start + p.from + p.count < row.request->num_prompt_tokens;
    if (has_tokens && row.request->num_prompt_logprobs >= 0) continue;
    require(false, "row " + std::to_string(p.row) + " has no " + std::to_string(p.count) +
                       " prompt tokens to score from offset " + std::to_string(p.from) + " on");
  }
}

int32_t Decoder::sample_row(int64_t row, const float* logits, int thread) {
  const PlannedRow& planned = rows_[static_cast<size_t>(row)];
  const RequestState& request = *planned.request;
  const TokenHistory history{request.token_ids.data(), planned.start + planned.num_tokens,
                             request.num_prompt_tokens};
  return sample_token(logits, config_.num_valid_tokens, request.sampling, history,
                      sampling_scratch_[static_cast<size_t>(thread)], &logprobs_[static_cast<size_t>(row)]);
}

// A score of logits that are not finite keeps rank 0.
void Decoder::score(const Wanted& wanted, const float* logits) {
  const RequestState& request = *rows_[static_cast<size_t>(wanted.row)].request;
  score_token(logits, config_.num_valid_tokens, request.token_ids[static_cast<size_t>(wanted.position + 1)],
              request.num_prompt_logprobs, &prompt_logprobs_[static_cast<size_t>(wanted.score)]);
}

// Samples and scores by the first `count` rows of logits_, which belong to wanted_ from `first` on.
void Decoder::use_logits(int64_t first, int64_t count, int32_t* tokens) {
  team_.run(count, [&](int64_t i, int thread) {
    const Wanted& wanted = wanted_[static_cast<size_t>(first + i)];
    const float* logits = logits_.get() + i * logits_stride_;
    if (wanted.score == kSampled) {
      tokens[wanted.row] = sample_row(wanted.row, logits, thread);
    } else {
      score(wanted, logits);
    }
  });
}

// Appends sampled tokens to what their requests know, and fails rows without a number.
void Decoder::take_tokens(int64_t num_rows, int64_t num_padded_rows, int32_t* tokens) {
  for (const Wanted& wanted : wanted_) {
    PlannedRow& planned = rows_[static_cast<size_t>(wanted.row)];
    int32_t& token = tokens[wanted.row];
    if (wanted.score != kSampled && prompt_logprobs_[static_cast<size_t>(wanted.score)].rank == 0) {
      token = kFailedToken;
      planned.request->failed = true;
    }
    if (wanted.score != kSampled) continue;
    if (wanted.row < num_rows - num_padded_rows) {
      if (planned.request->failed) token = kFailedToken;
      if (token == kFailedToken) planned.request->failed = true;
    }
    const int64_t end = planned.start + planned.num_tokens;
    if (end == static_cast<int64_t>(planned.request->token_ids.size())) {
      planned.request->token_ids.push_back(std::max(token, 0));
    }
  }
}

void Decoder::step(const StepRow* rows, int64_t num_rows, const int32_t* copies, int64_t num_copies,
                   int64_t num_padded_rows, const PromptLogits* prompts, int64_t num_prompts,
                   int32_t* tokens) {
  plan_rows(rows, num_rows, num_padded_rows);
  check_prompts(prompts, num_prompts);
  copy_blocks(copies, num_copies);
  sample_ns_ = 0;
  prompt_logprobs_.clear();
  if (num_tokens_ == 0) return;
  for (int64_t r = 0; r < num_rows; ++r) {
    const PlannedRow& row = rows_[static_cast<size_t>(r)];
    tokens[r] = kNoToken;
    if (num_prompts > 0 && prompts->row == r) {
      want_scores(*prompts++);
      --num_prompts;
    }
    if (row.logits_from < row.num_tokens) want_sample(r);
  }
  times_ = {};
  last_note_ = profiling_ ? now_ns() : 0;
  run_layers();
  const int64_t total = static_cast<int64_t>(wanted_.size());
  for (int64_t first = 0; first < total; first += logits_rows_) {
    const int64_t count = std::min(logits_rows_, total - first);
    compute_logits(first, count);
    const int64_t began = now_ns();
    use_logits(first, count, tokens);
    sample_ns_ += now_ns() - began;
    note(&StepTimes::sample);
  }
  take_tokens(num_rows, num_padded_rows, tokens);
}

}  // namespace everystop
