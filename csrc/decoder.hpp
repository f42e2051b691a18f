// One parametric decoder (RMSNorm, rotary attention with grouped KV heads, SiLU-gated MLP) over a paged KV
// cache, and the state of every request on board. It runs a whole step in one call: block copies, embedding,
// layers, logits, sampling. The tokens of all rows lie in one packed axis of T; nothing is padded, and
// nothing is allocated in a step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "attention.hpp"
#include "decoder_kernels.hpp"
#include "kv_cache.hpp"
#include "linear.hpp"
#include "sampling.hpp"
#include "thread_team.hpp"

namespace everystop {

struct DecoderConfig {
  Dtype dtype;
  KvType kv_type;
  int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
  int64_t vocab_size;        // rows of the embedding and the output projection
  int64_t num_valid_tokens;  // ids below this can be sampled
  float rms_norm_eps;
  float rope_factor;  // on cosines and sines
  std::vector<float> inv_freq;
  int64_t num_blocks, block_size;
  int64_t max_num_batched_tokens, max_num_seqs;
  int num_threads;

  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// Pointers into arrays that outlive the decoder; those that a model lacks are null.
struct LayerWeights {
  const float* attn_norm;
  const uint8_t* qkv;
  const float* qkv_bias;
  const float* q_norm;
  const float* k_norm;
  const uint8_t* o;
  const float* mlp_norm;
  const uint8_t* gate_up;
  const uint8_t* down;
};

struct DecoderWeights {
  const void* embed_tokens;  // float [V, D], or Half with Dtype::int8
  const float* norm;
  const uint8_t* lm_head;
  std::vector<LayerWeights> layers;
};

// A request's state, keyed by its id from admission to release.
struct RequestState {
  std::vector<int32_t> token_ids;  // prompt, then output
  int64_t num_prompt_tokens = 0;
  SamplingSettings sampling;
  int num_prompt_logprobs = -1;  // -1 none, 0 the prompt tokens' only, else also the best ones
  std::vector<int32_t> block_table;
  bool failed = false;  // a token could not be sampled; what follows is meaningless
};

// A scheduled row: `num_tokens` tokens from position `start`; logits from offset `logits_from` inside the row
// on.
struct StepRow {
  int64_t request_id, start, num_tokens, num_draft, logits_from;
};

// Prompt tokens of a row whose logits are wanted, to score the token that comes next: `count` of them from
// offset `from` inside the row on.
struct PromptLogits {
  int64_t row, from, count;
};

// Bugs that a kernel may be given on purpose, so that tests can show that they would be found.
enum class Mutant { none, quantize_over_batch, split_by_rows, scale_over_tokens };

// Nanoseconds of the last step by part; `prepare` holds norms, SiLU and quantising, up to every projection.
struct StepTimes {
  int64_t embed = 0, prepare = 0, qkv = 0, rope = 0, attention = 0, o = 0, gate_up = 0, down = 0, lm_head = 0,
          sample = 0;
};

class Decoder {
 public:
  Decoder(DecoderConfig config, DecoderWeights weights);

  const DecoderConfig& config() const { return config_; }
  const StepTimes& times() const { return times_; }
  void set_mutant(Mutant mutant) { mutant_ = mutant; }
  void set_profiling(bool on) { profiling_ = on; }
  // Whether layers fetch what the next attention reads; on from the start. Changes no result.
  void set_fetching(bool on) { fetching_ = on; }

  // Each throws std::invalid_argument, and changes nothing, when an id, size or block does not fit.
  void admit(int64_t request_id, RequestState state);
  void set_blocks(int64_t request_id, int64_t first_index, const int32_t* blocks, int64_t count);
  void release(int64_t request_id);

  // Copies blocks (source, destination), computes all rows, and samples where logits_from < num_tokens. Per
  // row: tokens[r] is the sampled id, kNoToken, kFailedToken or kMaskedToken; logprobs()[r] is filled where
  // the request asks. A sampled token becomes the request's next one, except in the last num_padded_rows
  // rows, whose results are thrown away. `prompts`, in the order of the rows, asks for scores:
  // prompt_logprobs() has them, one after the other; a row of which one is not finite fails.
  void step(const StepRow* rows, int64_t num_rows, const int32_t* copies, int64_t num_copies,
            int64_t num_padded_rows, const PromptLogits* prompts, int64_t num_prompts, int32_t* tokens);
  const std::vector<TokenLogprobs>& logprobs() const { return logprobs_; }
  const std::vector<TokenLogprobs>& prompt_logprobs() const { return prompt_logprobs_; }
  // Nanoseconds that the last step spent sampling.
  int64_t sample_ns() const { return sample_ns_; }

  // Logits of all rows' tokens from logits_from on, [count_logits(rows), num_valid_tokens], one after the
  // other.
  void forward(const StepRow* rows, int64_t num_rows, float* logits);
  static int64_t count_logits(const StepRow* rows, int64_t num_rows);

 private:
  struct PlannedRow {
    RequestState* request;
    int64_t start, num_tokens, logits_from;
    int64_t first_token;  // of the row, in the packed axis
  };
  // What the logits of one token are for: to sample its row's next token, or to be entry `score` of
  // prompt_logprobs_.
  struct Wanted {
    int64_t row, position;
    int64_t score;  // kSampled where the row samples
  };
  static constexpr int64_t kSampled = -1;
  struct PlannedToken {
    const RequestState* request;
    int64_t position;
    int64_t block, offset;
  };

  // y [m, n] (rows ldy apart) = x [m, k] · wᵀ + bias; its time counts as `part`.
  struct Projection {
    const uint8_t* weights;
    const float* x;
    int64_t m, n, k;
    const float* bias;
    float* y;
    int64_t ldy;
    int64_t StepTimes::* part;
    Upcoming upcoming = {};
    RowMaker make_rows = {};
    NextLayer next = {};
  };

  RequestState& find(int64_t request_id);
  void take_blocks(const int32_t* blocks, int64_t count);
  void plan_rows(const StepRow* rows, int64_t num_rows, int64_t num_padded_rows);
  void check_row(const StepRow& row, const RequestState& request) const;
  void add_row(const StepRow& row, RequestState& request);
  void want_logits(const PlannedRow& row, int64_t from, int64_t to);
  void want_scores(const PromptLogits& prompt);
  void want_sample(int64_t row);
  void add_tiles(const PlannedRow& row, int64_t from, int64_t to, int64_t out,
                 std::vector<AttentionTile>& tiles);
  void plan_fetches();
  Upcoming upcoming_keys(int64_t layer, int64_t StepTimes::* part) const;
  void copy_blocks(const int32_t* copies, int64_t num_copies);
  void run_layers();
  void embed();
  void run_attention_block(int64_t layer);
  void run_mlp_block(int64_t layer);
  void rotate_and_store(int64_t layer);
  void store(const PlannedToken& token, int64_t layer, const float* keys, const float* values);
  void store_on_one_grid(int64_t layer);
  void attend(int64_t layer, const std::vector<AttentionTile>& tiles);
  bool attend_by_splits(int64_t layer, const std::vector<AttentionTile>& tiles);
  void keep_wanted();
  void normalize(int64_t first, int64_t count, const float* delta, const float* weight);
  void project(const Projection& p);
  void project_exactly(const Projection& p);
  void project_quantized_over_batch(const Projection& p);
  void project_split_by_rows(const Projection& p);
  void compute_logits(int64_t first, int64_t count);
  void check_prompts(const PromptLogits* prompts, int64_t num_prompts) const;
  void use_logits(int64_t first, int64_t count, int32_t* tokens);
  int32_t sample_row(int64_t row, const float* logits, int thread);
  void score(const Wanted& wanted, const float* logits);
  void take_tokens(int64_t num_rows, int64_t num_padded_rows, int32_t* tokens);
  template <class F>
  void for_rows(int64_t num_rows, int64_t cost, F&& body);
  void note(int64_t StepTimes::* part);

  DecoderConfig config_;
  DecoderWeights weights_;
  const DecoderKernels& kernels_;
  ThreadTeam team_;
  KvCache cache_;
  std::unordered_map<int64_t, std::unique_ptr<RequestState>> requests_;
  int64_t logits_stride_;
  int64_t logits_rows_;  // computed at once

  // Of the step that runs.
  std::vector<PlannedRow> rows_;
  std::vector<PlannedToken> tokens_;
  std::vector<AttentionTile> tiles_, last_tiles_;  // of the last layer, for wanted tokens only
  std::vector<int64_t> logits_tokens_;             // packed index of each token whose logits are wanted
  std::vector<Wanted> wanted_;                     // what each of these logits is for
  std::vector<TokenLogprobs> logprobs_, prompt_logprobs_;
  std::vector<int32_t> context_blocks_;  // whose keys and values are fetched before a layer attends
  int64_t num_tokens_ = 0;
  int64_t num_live_ = 0;  // rows of hidden_ that are still computed
  int64_t sample_ns_ = 0;

  // Scratch; sizes in floats unless said.
  struct FreeDeleter {
    void operator()(void* p) const;
  };
  template <class T>
  using Scratch = std::unique_ptr<T[], FreeDeleter>;
  template <class T>
  static Scratch<T> allocate(int64_t count);
  Scratch<float> hidden_;                          // [T, D]
  Scratch<float> normed_;                          // [T, D]
  Scratch<float> qkv_;                             // [T, Q + 2K]
  Scratch<float> attended_;                        // [T, Q]
  Scratch<float> delta_;                           // [T, D]
  Scratch<float> gate_up_;                         // [T, 2I]
  Scratch<float> activated_;                       // [T, I]
  Scratch<float> cosines_, sines_;                 // [T, head_dim / 2]
  Scratch<float> logits_;                          // [logits_rows, logits_stride]
  Scratch<uint8_t> activations_;                   // bytes
  Scratch<float> partials_;                        // of attention splits
  std::vector<Scratch<float>> attention_scratch_;  // per thread
  std::vector<SamplingScratch> sampling_scratch_;  // per thread

  StepTimes times_;
  bool profiling_ = false;
  bool fetching_ = true;
  int64_t last_note_ = 0;
  Mutant mutant_ = Mutant::none;
};

}  // namespace everystop
