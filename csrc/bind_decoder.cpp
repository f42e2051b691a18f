// Python bindings of the decoder, and of its kernels for tests. Checks every size; the kernels check none.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activation.hpp"
#include "decoder.hpp"
#include "gil.hpp"
#include "norm.hpp"
#include "random.hpp"
#include "rope.hpp"

namespace nb = nanobind;

namespace everystop {
namespace {

template <class T, int kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T, int kDims>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<kDims>, nb::c_contig>;

void require(bool condition, const std::string& message) {
  if (!condition) throw nb::value_error(message.c_str());
}

int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

// A new numpy array, and where its elements begin.
template <class T, int kDims>
std::pair<Output<T, kDims>, T*> make_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (const size_t size : shape) count *= size;
  auto data = std::make_unique<T[]>(count + 1);
  T* begin = data.get();
  nb::capsule owner(data.release(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {Output<T, kDims>(begin, shape, owner), begin};
}

template <class T>
T entry(const nb::dict& values, const char* name) {
  require(values.contains(name), std::string("the decoder's configuration lacks ") + name);
  return nb::cast<T>(values[name]);
}

int64_t positive(const nb::dict& values, const char* name) {
  const int64_t value = entry<int64_t>(values, name);
  require(value >= 1 && value < int64_t{1} << 31,
          std::string(name) + " must be between 1 and 2,147,483,647, not " + std::to_string(value));
  return value;
}

KvType read_kv_type(const std::string& name) {
  if (name == "float32") return KvType::float32;
  if (name == "float16") return KvType::float16;
  require(name == "int8", "kv_cache_dtype must be float32, float16 or int8, not " + name);
  return KvType::int8;
}

DecoderConfig read_config(const nb::dict& d) {
  DecoderConfig c{};
  const std::string dtype = entry<std::string>(d, "dtype");
  require(dtype == "int8" || dtype == "float32", "dtype must be int8 or float32, not " + dtype);
  c.dtype = dtype == "int8" ? Dtype::int8 : Dtype::float32;
  c.kv_type = read_kv_type(entry<std::string>(d, "kv_cache_dtype"));
  c.num_layers = positive(d, "num_layers");
  c.hidden_size = positive(d, "hidden_size");
  c.intermediate_size = positive(d, "intermediate_size");
  c.num_heads = positive(d, "num_heads");
  c.num_kv_heads = positive(d, "num_kv_heads");
  c.head_dim = positive(d, "head_dim");
  c.vocab_size = positive(d, "vocab_size");
  c.num_valid_tokens = positive(d, "num_valid_tokens");
  c.rms_norm_eps = entry<float>(d, "rms_norm_eps");
  c.rope_factor = entry<float>(d, "rope_factor");
  c.num_blocks = positive(d, "num_blocks");
  c.block_size = positive(d, "block_size");
  c.max_num_batched_tokens = positive(d, "max_num_batched_tokens");
  c.max_num_seqs = positive(d, "max_num_seqs");
  c.num_threads = entry<int>(d, "num_threads");
  const auto inv_freq = entry<Input<float, 1>>(d, "inv_freq");
  c.inv_freq.assign(inv_freq.data(), inv_freq.data() + inv_freq.size());
  require(c.num_heads % c.num_kv_heads == 0, std::to_string(c.num_heads) + " heads cannot share " +
                                                 std::to_string(c.num_kv_heads) + " KV heads evenly");
  require(c.head_dim % 2 == 0 && static_cast<int64_t>(c.inv_freq.size()) == c.head_dim / 2,
          "inv_freq has " + std::to_string(c.inv_freq.size()) + " entries for a head of " +
              std::to_string(c.head_dim));
  require(c.num_valid_tokens <= c.vocab_size, "num_valid_tokens exceeds vocab_size");
  return c;
}

// The arrays of a weight dict, checked for type and size.
class WeightReader {
 public:
  explicit WeightReader(const nb::dict& weights) : weights_(weights) {}

  const float* floats(const std::string& name, int64_t size) const {
    const auto array = get<nb::ndarray<const float, nb::c_contig, nb::device::cpu>>(name);
    check(name, static_cast<int64_t>(array.size()), size);
    return array.data();
  }

  const float* optional_floats(const std::string& name, int64_t size) const {
    return weights_.contains(name.c_str()) ? floats(name, size) : nullptr;
  }

  const uint8_t* packed(const std::string& name, Dtype dtype, int64_t n, int64_t k) const {
    const auto array = get<Input<uint8_t, 1>>(name);
    check(name, static_cast<int64_t>(array.size()), static_cast<int64_t>(packed_linear_bytes(dtype, n, k)));
    require(reinterpret_cast<uintptr_t>(array.data()) % 64 == 0,
            name + " must start at a multiple of 64 bytes");
    return array.data();
  }

  const void* halves(const std::string& name, int64_t size) const {
    const auto array = get<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>(name);
    const nb::dlpack::dtype type = array.dtype();
    require(type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16,
            name + " must be float16");
    check(name, static_cast<int64_t>(array.size()), size);
    return array.data();
  }

 private:
  template <class Array>
  Array get(const std::string& name) const {
    require(weights_.contains(name.c_str()), "the weights lack " + name);
    Array array;
    require(nb::try_cast(weights_[name.c_str()], array, false), name + " has the wrong type or shape");
    return array;
  }

  static void check(const std::string& name, int64_t size, int64_t expected) {
    require(size == expected,
            name + " has " + std::to_string(size) + " entries, expected " + std::to_string(expected));
  }

  const nb::dict& weights_;
};

DecoderWeights read_weights(const nb::dict& dict, const DecoderConfig& c) {
  const WeightReader reader(dict);
  DecoderWeights weights{};
  const int64_t d = c.hidden_size;
  weights.embed_tokens = c.dtype == Dtype::int8 ? reader.halves("embed_tokens", c.vocab_size * d)
                                                : reader.floats("embed_tokens", c.vocab_size * d);
  weights.norm = reader.floats("norm", d);
  weights.lm_head = reader.packed("lm_head", c.dtype, c.vocab_size, d);
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    weights.layers.push_back(
        {reader.floats(prefix + "attn_norm", d), reader.packed(prefix + "qkv", c.dtype, c.qkv_size(), d),
         reader.optional_floats(prefix + "qkv_bias", c.qkv_size()),
         reader.optional_floats(prefix + "q_norm", c.head_dim),
         reader.optional_floats(prefix + "k_norm", c.head_dim),
         reader.packed(prefix + "o", c.dtype, d, c.q_size()), reader.floats(prefix + "mlp_norm", d),
         reader.packed(prefix + "gate_up", c.dtype, 2 * c.intermediate_size, d),
         reader.packed(prefix + "down", c.dtype, d, c.intermediate_size)});
  }
  return weights;
}

SamplingSettings read_sampling(const nb::dict& d, int64_t num_valid_tokens) {
  SamplingSettings s;
  s.temperature = entry<float>(d, "temperature");
  s.top_k = entry<int64_t>(d, "top_k");
  s.top_p = entry<double>(d, "top_p");
  s.min_p = entry<double>(d, "min_p");
  s.repetition_penalty = entry<float>(d, "repetition_penalty");
  s.presence_penalty = entry<float>(d, "presence_penalty");
  s.frequency_penalty = entry<float>(d, "frequency_penalty");
  s.seed = entry<uint64_t>(d, "seed");
  s.choice = entry<uint32_t>(d, "choice_index");
  s.min_tokens = entry<int64_t>(d, "min_tokens");
  s.num_logprobs = entry<int>(d, "num_logprobs");
  s.stop_ids = entry<std::vector<int32_t>>(d, "stop_token_ids");
  for (const auto& [id, bias] : entry<std::vector<std::tuple<int32_t, float>>>(d, "logit_bias")) {
    s.logit_bias.emplace_back(id, bias);
  }
  s.bad_words = entry<std::vector<std::vector<int32_t>>>(d, "bad_word_ids");
  if (!d["allowed_token_ids"].is_none()) {
    const auto ids = entry<Input<int32_t, 1>>(d, "allowed_token_ids");
    s.allowed.assign(static_cast<size_t>((num_valid_tokens + 31) / 32), 0);
    for (const int32_t* id = ids.data(); id != ids.data() + ids.size(); ++id) {
      if (*id < 0 || *id >= num_valid_tokens) {  // the message is not made for each of many good ids
        require(false, "allowed token " + std::to_string(*id) + " is outside the vocabulary");
      }
      s.allowed[static_cast<size_t>(*id / 32)] |= 1u << (*id % 32);
    }
  }
  require(s.repetition_penalty > 0.0f, "repetition_penalty must be above 0");
  require(s.temperature >= 0.0f, "temperature must be at least 0");
  require(s.top_k >= 0, "top_k must be at least 0");
  require(s.top_p >= 0.0 && s.top_p <= 1.0, "top_p must be between 0 and 1");
  require(s.min_p >= 0.0 && s.min_p <= 1.0, "min_p must be between 0 and 1");
  return s;
}

// (logprob, rank, ((id, logprob), …))
nb::tuple to_python(const TokenLogprobs& entry) {
  nb::list top;
  for (int i = 0; i < entry.num_top; ++i) top.append(nb::make_tuple(entry.top_ids[i], entry.top_logprobs[i]));
  return nb::make_tuple(entry.logprob, entry.rank, nb::tuple(top));
}

// Rows of int64 in a buffer of Python's: an array('q') or a numpy array, which are read where they lie.
class RowsView {
 public:
  explicit RowsView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
      throw nb::python_error();
    const std::string format = view_.format == nullptr ? "B" : view_.format;
    const bool is_int64 = view_.itemsize == sizeof(int64_t) && (format == "q" || format == "l");
    if (is_int64 && view_.len % sizeof(StepRow) == 0 && (view_.ndim < 2 || view_.shape[view_.ndim - 1] == 5))
      return;
    PyBuffer_Release(&view_);
    require(false, "a row has 5 entries of int64: request, start, num_tokens, num_draft, logits_from");
  }
  RowsView(const RowsView&) = delete;
  RowsView& operator=(const RowsView&) = delete;
  ~RowsView() { PyBuffer_Release(&view_); }

  const StepRow* rows() const { return static_cast<const StepRow*>(view_.buf); }
  int64_t num_rows() const { return static_cast<int64_t>(view_.len / sizeof(StepRow)); }

 private:
  Py_buffer view_{};
};

// A decoder that keeps its weight arrays alive.
class PyDecoder {
 public:
  PyDecoder(const nb::dict& config, nb::dict weights) : weights_(std::move(weights)) {
    DecoderConfig c = read_config(config);
    DecoderWeights w = read_weights(weights_, c);
    tokens_.resize(static_cast<size_t>(c.max_num_seqs));
    decoder_ = std::make_unique<Decoder>(std::move(c), std::move(w));
  }

  void admit(int64_t request_id, Input<int32_t, 1> token_ids, int64_t num_prompt_tokens,
             const nb::dict& sampling, Input<int32_t, 1> block_table) {
    RequestState state;
    state.token_ids.assign(token_ids.data(), token_ids.data() + token_ids.size());
    state.num_prompt_tokens = num_prompt_tokens;
    state.sampling = read_sampling(sampling, decoder_->config().num_valid_tokens);
    state.num_prompt_logprobs = entry<int>(sampling, "num_prompt_logprobs");
    state.block_table.assign(block_table.data(), block_table.data() + block_table.size());
    decoder_->admit(request_id, std::move(state));
  }

  void set_blocks(int64_t request_id, int64_t first_index, const std::vector<int32_t>& blocks) {
    decoder_->set_blocks(request_id, first_index, blocks.data(), static_cast<int64_t>(blocks.size()));
  }

  void release(int64_t request_id) { decoder_->release(request_id); }

  nb::list step(nb::handle rows, std::optional<Input<int32_t, 2>> copies, int64_t num_padded_rows,
                std::optional<Input<int64_t, 2>> prompts) {
    const RowsView view(rows);
    const int64_t num_rows = view.num_rows();
    require(!copies || copies->shape(0) == 0 || copies->shape(1) == 2,
            "copies must be pairs (source, destination)");
    require(num_padded_rows >= 0 && num_padded_rows <= num_rows, "too many padded rows");
    require(num_rows <= static_cast<int64_t>(tokens_.size()), "more rows than max_num_seqs");
    require(!prompts || prompts->shape(1) == 3, "prompts must be triples (row, from, count)");
    const auto* spans = prompts ? reinterpret_cast<const PromptLogits*>(prompts->data()) : nullptr;
    const int64_t num_spans = prompts ? static_cast<int64_t>(prompts->shape(0)) : 0;
    const int64_t num_copies = copies ? static_cast<int64_t>(copies->shape(0)) : 0;
    CallTimes times{};
    {
      const GilReleased released;
      const int64_t began = clock_ns(CLOCK_MONOTONIC), began_cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
      decoder_->step(view.rows(), num_rows, copies ? copies->data() : nullptr, num_copies, num_padded_rows,
                     spans, num_spans, tokens_.data());
      times.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - began_cpu;
      times.ended = clock_ns(CLOCK_MONOTONIC);
      times.native = times.ended - began;
    }
    times.gil_wait = clock_ns(CLOCK_MONOTONIC) - times.ended;
    call_times_ = times;
    nb::list tokens;
    for (int64_t row = 0; row < num_rows; ++row) tokens.append(tokens_[static_cast<size_t>(row)]);
    return tokens;
  }

  Output<float, 2> forward(Input<int64_t, 2> rows) {
    check_rows(rows);
    const auto* data = reinterpret_cast<const StepRow*>(rows.data());
    const int64_t num_rows = static_cast<int64_t>(rows.shape(0));
    const size_t count = static_cast<size_t>(Decoder::count_logits(data, num_rows));
    auto [logits, out] =
        make_array<float, 2>({count, static_cast<size_t>(decoder_->config().num_valid_tokens)});
    const GilReleased released;
    decoder_->forward(data, num_rows, out);
    return logits;
  }

  // (logprob, rank, [(id, logprob), …]) of the token that row r of the last step sampled.
  nb::tuple logprobs(int64_t row) const {
    require(row >= 0 && row < static_cast<int64_t>(tokens_.size()), "no such row");
    return to_python(decoder_->logprobs()[static_cast<size_t>(row)]);
  }

  // The same for each prompt token that the last step scored, in order.
  nb::list prompt_logprobs() const {
    nb::list all;
    for (const TokenLogprobs& entry : decoder_->prompt_logprobs()) all.append(to_python(entry));
    return all;
  }

  int64_t sample_ns() const { return decoder_->sample_ns(); }

  // Nanoseconds of the last step: without the interpreter lock, waiting for it afterwards, and of the
  // caller's processor time.
  nb::tuple call_ns() const {
    return nb::make_tuple(call_times_.native, call_times_.gil_wait, call_times_.cpu);
  }

  nb::dict times() const {
    const StepTimes& t = decoder_->times();
    nb::dict out;
    out["embed"] = t.embed;
    out["prepare"] = t.prepare;
    out["qkv"] = t.qkv;
    out["rope"] = t.rope;
    out["attention"] = t.attention;
    out["o"] = t.o;
    out["gate_up"] = t.gate_up;
    out["down"] = t.down;
    out["lm_head"] = t.lm_head;
    out["sample"] = t.sample;
    return out;
  }

  void set_profiling(bool on) { decoder_->set_profiling(on); }

  void set_fetching(bool on) { decoder_->set_fetching(on); }

  void set_mutant(const std::string& name) {
    require(name == "quantize_over_batch" || name == "split_by_rows" || name == "scale_over_tokens" ||
                name == "none",
            "no mutant " + name);
    decoder_->set_mutant(name == "none"                ? Mutant::none
                         : name == "split_by_rows"     ? Mutant::split_by_rows
                         : name == "scale_over_tokens" ? Mutant::scale_over_tokens
                                                       : Mutant::quantize_over_batch);
  }

 private:
  static void check_rows(const Input<int64_t, 2>& rows) {
    require(rows.shape(1) == 5, "a row has 5 entries: request, start, num_tokens, num_draft, logits_from");
  }

  struct CallTimes {
    int64_t native, ended, gil_wait, cpu;
  };

  nb::dict weights_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<int32_t> tokens_;  // of the last step
  CallTimes call_times_{};
};

// ------------------------------------------------------------------------------- kernels, for tests

Output<float, 2> py_rms_norm(Input<float, 2> x, Input<float, 1> weight, float eps, bool naive) {
  require(x.shape(1) == weight.size(), "x and weight differ in size");
  auto [out, data] = make_array<float, 2>({x.shape(0), x.shape(1)});
  const int64_t n = static_cast<int64_t>(x.shape(1));
  for (size_t r = 0; r < x.shape(0); ++r) {
    const auto norm = naive ? rms_norm_naive : decoder_kernels().rms_norm;
    norm(x.data() + r * x.shape(1), weight.data(), n, eps, data + r * x.shape(1));
  }
  return out;
}

Output<float, 2> py_silu_mul(Input<float, 2> gate, Input<float, 2> up, bool naive) {
  require(gate.shape(0) == up.shape(0) && gate.shape(1) == up.shape(1), "gate and up differ in shape");
  auto [out, data] = make_array<float, 2>({gate.shape(0), gate.shape(1)});
  for (size_t r = 0; r < gate.shape(0); ++r) {
    const size_t first = r * gate.shape(1);
    const auto silu = naive ? silu_mul_naive : decoder_kernels().silu_mul;
    silu(gate.data() + first, up.data() + first, static_cast<int64_t>(gate.shape(1)), data + first);
  }
  return out;
}

// x [H, head_dim] rotated to one position.
Output<float, 2> py_rope(Input<float, 2> x, Input<float, 1> inv_freq, int64_t position, float factor,
                         bool naive) {
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  require(static_cast<int64_t>(x.shape(1)) == 2 * half, "a head needs two entries for each frequency");
  auto [out, data] = make_array<float, 2>({x.shape(0), x.shape(1)});
  std::memcpy(data, x.data(), x.size() * sizeof(float));
  std::vector<float> cosines(inv_freq.size()), sines(inv_freq.size());
  rope_angles(position, inv_freq.data(), half, factor, cosines.data(), sines.data());
  for (size_t h = 0; h < x.shape(0); ++h) {
    const auto rotate = naive ? rotate_half_naive : decoder_kernels().rotate_half;
    rotate(data + h * x.shape(1), cosines.data(), sines.data(), half);
  }
  return out;
}

// x [H, head_dim] with what stands out in each head spread over it.
Output<float, 2> py_spread(Input<float, 2> x) {
  auto [out, data] = make_array<float, 2>({x.shape(0), x.shape(1)});
  std::memcpy(data, x.data(), x.size() * sizeof(float));
  const int64_t dim = static_cast<int64_t>(x.shape(1));
  for (size_t h = 0; h < x.shape(0); ++h) decoder_kernels().spread(data + static_cast<int64_t>(h) * dim, dim);
  return out;
}

// Attention of q [T, H, d] at positions first_position … over k, v [first_position + T, KV, d], stored in the
// blocks of block_table first. Rows go in tiles of at most tile_rows.
Output<float, 3> py_attention(Input<float, 3> q, Input<float, 3> k, Input<float, 3> v, int64_t first_position,
                              int64_t block_size, Input<int32_t, 1> block_table,
                              const std::string& kv_cache_dtype, int64_t tile_rows, bool naive) {
  const int64_t num_rows = static_cast<int64_t>(q.shape(0)), num_heads = static_cast<int64_t>(q.shape(1));
  const int64_t dim = static_cast<int64_t>(q.shape(2)), num_kv_heads = static_cast<int64_t>(k.shape(1));
  const int64_t num_keys = static_cast<int64_t>(k.shape(0));
  require(k.shape(2) == q.shape(2) && v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) &&
              v.shape(2) == k.shape(2),
          "q, k and v do not fit together");
  require(first_position >= 0 && num_keys == first_position + num_rows && num_rows > 0,
          "as many keys as positions");
  require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "query heads must share KV heads evenly");
  int32_t largest = 0;
  for (size_t i = 0; i < block_table.size(); ++i) {
    require(block_table.data()[i] >= 0, "negative block");
    largest = std::max(largest, block_table.data()[i]);
  }
  require(static_cast<int64_t>(block_table.size()) * block_size >= num_keys,
          "the blocks do not hold all keys");
  const int64_t group = num_heads / num_kv_heads;
  require(tile_rows >= 1 && 256 % tile_rows == 0 && tile_rows <= attention_tile_rows(group),
          "no such tile_rows");

  KvCache cache({num_kv_heads, dim, block_size, read_kv_type(kv_cache_dtype)}, 1, largest + 1);
  const DecoderKernels& kernels = decoder_kernels();
  for (int64_t t = 0; t < num_keys; ++t) {
    kernels.write_token(cache.layout(), cache.keys(0), cache.values(0), block_table.data()[t / block_size],
                        t % block_size, k.data() + t * num_kv_heads * dim, v.data() + t * num_kv_heads * dim);
  }
  auto [out, data] = make_array<float, 3>({q.shape(0), q.shape(1), q.shape(2)});
  const auto bytes = static_cast<size_t>(attention_scratch_floats(cache.layout(), group)) * sizeof(float);
  std::unique_ptr<float, void (*)(void*)> scratch(
      static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), std::free);
  for (int64_t row = 0; row < num_rows;) {
    const int64_t position = first_position + row;
    const int64_t count = std::min(tile_rows - position % tile_rows, num_rows - row);
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t offset = (row * num_heads + head * group) * dim;
      const AttentionTile tile{block_table.data(),
                               position,
                               count,
                               head,
                               group,
                               1.0f / std::sqrt(static_cast<float>(dim)),
                               q.data() + offset,
                               num_heads * dim,
                               data + offset,
                               num_heads * dim};
      if (naive) {
        attend_naive(cache.layout(), cache.keys(0), cache.values(0), tile);
      } else {
        kernels.attend(cache.layout(), cache.keys(0), cache.values(0), tile, nullptr, scratch.get());
      }
    }
    row += count;
  }
  return out;
}

// (token, logprobs or None) for one row of logits.
nb::tuple py_sample(Input<float, 1> logits, const nb::dict& sampling, Input<int32_t, 1> token_ids,
                    int64_t num_prompt_tokens, bool naive) {
  const int64_t n = static_cast<int64_t>(logits.size());
  require(n >= 1, "no logits");
  const SamplingSettings settings = read_sampling(sampling, n);
  const TokenHistory history{token_ids.data(), static_cast<int64_t>(token_ids.size()), num_prompt_tokens};
  for (size_t i = 0; i < token_ids.size(); ++i) {
    require(token_ids.data()[i] >= 0 && token_ids.data()[i] < n, "a token outside the vocabulary");
  }
  for (const int32_t id : settings.stop_ids) require(id >= 0 && id < n, "a stop id outside the vocabulary");
  for (const auto& bias : settings.logit_bias)
    require(bias.first >= 0 && bias.first < n, "a bias outside the vocabulary");
  for (const std::vector<int32_t>& word : settings.bad_words) {
    require(!word.empty(), "an empty bad word");
    for (const int32_t id : word) require(id >= 0 && id < n, "a bad word outside the vocabulary");
  }
  require(settings.num_logprobs <= kMaxLogprobs, "too many log-probabilities");
  require(num_prompt_tokens >= 0 && num_prompt_tokens <= history.num_tokens,
          "more prompt tokens than tokens");
  if (naive) return nb::make_tuple(sample_token_naive(logits.data(), n, settings, history), nb::none());
  SamplingScratch scratch(n);
  auto entry = std::make_unique<TokenLogprobs>();
  const int32_t token = sample_token(logits.data(), n, settings, history, scratch, entry.get());
  if (settings.num_logprobs < 0 || token < 0) return nb::make_tuple(token, nb::none());
  return nb::make_tuple(token, to_python(*entry));
}

std::vector<uint32_t> py_philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  require(counter.size() == 4 && key.size() == 2, "philox4x32 takes a counter of 4 words and a key of 2");
  const auto words = philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  return {words.begin(), words.end()};
}

}  // namespace

void bind_decoder(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PyDecoder>(
      m, "Decoder",
      "A decoder over packed weights with its paged KV cache and the state of all requests on board.")
      .def(nb::init<const nb::dict&, nb::dict>(), "config"_a, "weights"_a)
      .def("admit", &PyDecoder::admit, "request_id"_a, "token_ids"_a.noconvert(), "num_prompt_tokens"_a,
           "sampling"_a, "block_table"_a.noconvert(), "Takes a request on board; it must not be there yet.")
      .def("set_blocks", &PyDecoder::set_blocks, "request_id"_a, "first_index"_a, "block_ids"_a,
           "Replaces or extends a request's block table from first_index on.")
      .def("release", &PyDecoder::release, "request_id"_a, "Forgets a request; unknown ids are ignored.")
      .def("step", &PyDecoder::step, "rows"_a, "copies"_a.noconvert() = nb::none(), "num_padded_rows"_a = 0,
           "prompts"_a.noconvert() = nb::none(),
           "Runs one step over rows, a buffer of int64 [R, 5], after copies int32 [C, 2]; returns for each "
           "the sampled token, -1 for none, -2 where the logits were not finite, -3 where every token is "
           "masked. prompts int64 [P, 3], as (row, offset in the row, count), are tokens behind which the "
           "prompt's next token is scored.")
      .def("prompt_logprobs", &PyDecoder::prompt_logprobs,
           "What the last step scored, in the order in which it was asked: [(logprob, rank, ((id, logprob), "
           "...)), ...].")
      .def("logprobs", &PyDecoder::logprobs, "row"_a,
           "(logprob, rank, ((id, logprob), ...)) of the token that a row of the last step sampled.")
      .def("sample_ns", &PyDecoder::sample_ns, "Nanoseconds that the last step spent sampling.")
      .def("call_ns", &PyDecoder::call_ns,
           "(native, gil_wait, cpu) of the last step, nanoseconds: outside the interpreter lock, waiting for "
           "it "
           "afterwards, and the calling thread's processor time of the first.")
      .def("forward", &PyDecoder::forward, "rows"_a.noconvert(),
           "Logits float32 [sum of wanted tokens, num_valid_tokens] of rows int64 [R, 5], from logits_from "
           "on.")
      .def("set_profiling", &PyDecoder::set_profiling, "on"_a)
      .def("set_fetching", &PyDecoder::set_fetching, "on"_a,
           "Whether layers fetch what the next attention reads; on from the start, and changes no result.")
      .def("set_mutant", &PyDecoder::set_mutant, "name"_a, "Plants a bug, for tests that must find it.")
      .def("times", &PyDecoder::times, "Nanoseconds of the last step by part, where profiling is on.");

  m.def("rms_norm", &py_rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "naive"_a = false,
        "Each row of x [R, n] as x / sqrt(mean(x²) + eps) · weight.");
  m.def("silu_mul", &py_silu_mul, "gate"_a.noconvert(), "up"_a.noconvert(), "naive"_a = false,
        "gate / (1 + exp(-gate)) · up, [R, n].");
  m.def("rope", &py_rope, "x"_a.noconvert(), "inv_freq"_a.noconvert(), "position"_a, "factor"_a = 1.0f,
        "naive"_a = false, "Heads x [H, 2 · len(inv_freq)] rotated to a position.");
  m.def("spread", &py_spread, "x"_a.noconvert(),
        "x [H, d] after a Hadamard transform of blocks of 64, 32 or 16, if d is a multiple of one of them.");
  m.def("attention", &py_attention, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
        "first_position"_a, "block_size"_a, "block_table"_a.noconvert(), "kv_cache_dtype"_a = "float32",
        "tile_rows"_a = 1, "naive"_a = false,
        "Causal attention of q [T, H, d] over k, v [first_position + T, KV, d] through a paged cache.");
  m.def("sample", &py_sample, "logits"_a.noconvert(), "sampling"_a, "token_ids"_a.noconvert(),
        "num_prompt_tokens"_a, "naive"_a = false,
        "(token, logprobs or None) for one row of logits float32 [V].");
  m.def("philox4x32", &py_philox, "counter"_a, "key"_a, "Four random 32-bit words of a counter and a key.");
  m.def(
      "uniform_draw",
      [](uint64_t seed, uint32_t choice, uint64_t position) {
        return uniform_draw(seed, choice, position, DrawKind::token);
      },
      "seed"_a, "choice_index"_a, "position"_a,
      "The number in [0, 1) that the token at an output position is drawn by.");
}

}  // namespace everystop
