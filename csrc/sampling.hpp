// Choosing one token from a row of logits, by one request's own settings and history.
//
// Order: logit bias, repetition penalty (prompt and output), presence and frequency penalties (output only),
// masks (allowed ids, bad words, stop ids before min_tokens), then greedy, or temperature, top-k, top-p,
// min-p and one draw. All filters cut the order "logit descending, id ascending"; ties go to the lowest id.
// Log-probabilities are those of the raw logits. Everything here is a function of the row, the settings and
// the tokens before it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace everystop {

// Temperatures below this are greedy: 1 / temperature would leave the range where exponents mean anything.
constexpr float kGreedyTemperature = 1e-5f;
constexpr int32_t kNoToken = -1;
constexpr int32_t kFailedToken = -2;  // the logits are not finite
constexpr int32_t kMaskedToken = -3;  // every token is masked
constexpr int kMaxLogprobs = 64;

struct SamplingSettings {
  float temperature = 1.0f;
  int64_t top_k = 0;  // 0 is all
  double top_p = 1.0;
  double min_p = 0.0;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  uint32_t choice = 0;
  int64_t min_tokens = 0;
  int num_logprobs = -1;  // -1 none, 0 the chosen token's only, else also the best ones
  std::vector<int32_t> stop_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<uint32_t> allowed;  // bit i % 32 of word i / 32; empty allows all
  // Sequences that must not come about in the output: the last token is masked behind the others.
  std::vector<std::vector<int32_t>> bad_words;

  bool is_greedy() const { return temperature < kGreedyTemperature; }
  bool changes_logits() const;
};

// A request's tokens before the one to sample.
struct TokenHistory {
  const int32_t* ids;
  int64_t num_tokens;
  int64_t num_prompt_tokens;

  int64_t num_output_tokens() const { return num_tokens - num_prompt_tokens; }
  // The output ends with the first `count` of these ids.
  bool output_ends_with(const std::vector<int32_t>& word, int64_t count) const;
};

// Log-probabilities of one token, sampled or given; `rank` is 1 for the first in the order "logit descending,
// id ascending".
struct TokenLogprobs {
  float logprob = 0.0f;
  int32_t rank = 0;
  int num_top = 0;
  int32_t top_ids[kMaxLogprobs];
  float top_logprobs[kMaxLogprobs];
};

// One thread's scratch for rows of up to n logits.
class SamplingScratch {
 public:
  explicit SamplingScratch(int64_t n);

 private:
  friend class RowSampler;
  std::vector<float> logits;
  std::vector<float> weights;
  std::vector<float> run_sums;
  std::vector<int32_t> counts;  // zero between calls
  std::vector<int32_t> candidate_ids;
  std::vector<int32_t> bin_counts;
  std::vector<double> bin_masses;
};

// Samples one token of logits[n]; `logprobs` is filled where the settings ask and it is not null. Allocates
// nothing.
int32_t sample_token(const float* logits, int64_t n, const SamplingSettings& settings,
                     const TokenHistory& history, SamplingScratch& scratch, TokenLogprobs* logprobs);

// Log-probabilities of `token`, and of the `num_top` best ones, after logits[n]; nothing is written where
// they are not finite. The same bits as those of a sampled token.
void score_token(const float* logits, int64_t n, int32_t token, int num_top, TokenLogprobs* logprobs);

// The slow, obvious version: sorts the whole vocabulary and sums in double.
int32_t sample_token_naive(const float* logits, int64_t n, const SamplingSettings& settings,
                           const TokenHistory& history);

}  // namespace everystop
