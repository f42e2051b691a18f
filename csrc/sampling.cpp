#include "sampling.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "decoder_kernels.hpp"
#include "random.hpp"

namespace everystop {

namespace {

constexpr int64_t kRun = 256;
constexpr int kNumBins = 2048;
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kMostHeaped = 256;   // tokens that a heap finds faster than bins
constexpr int64_t kMostSorted = 4096;  // candidates worth sorting

// The last token kept, in the order "logit descending, id ascending".
struct Cut {
  float logit;
  int32_t id;
  bool keeps(float other_logit, int32_t other_id) const {
    return other_logit > logit || (other_logit == logit && other_id <= id);
  }
};

// The order "logit descending, id ascending".
struct Before {
  const float* x;
  bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// The ids of the best k of x[n], in no order: a heap whose root is the last of them; ids rise, so a tie with
// the root never enters.
void keep_best(const DecoderKernels& kernels, const float* x, int64_t n, int64_t k, int32_t* ids) {
  const Before before{x};
  for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int32_t>(i);
  std::make_heap(ids, ids + k, before);
  for (int64_t i = kernels.next_greater(x, k, n, x[ids[0]]); i < n;
       i = kernels.next_greater(x, i + 1, n, x[ids[0]])) {
    std::pop_heap(ids, ids + k, before);
    ids[k - 1] = static_cast<int32_t>(i);
    std::push_heap(ids, ids + k, before);
  }
}

// Log-probabilities of a token and of the best k, of raw logits x[n] whose greatest is `top`.
void fill_logprobs(const DecoderKernels& kernels, const float* x, int64_t n, float top, int32_t token,
                   int64_t k, TokenLogprobs& out) {
  const double sum = kernels.exp2_of(x, n, top, kLog2E, nullptr, nullptr);
  const double log_sum = static_cast<double>(top) + std::log(sum);
  const float logit = x[token];
  out.logprob = static_cast<float>(static_cast<double>(logit) - log_sum);
  int64_t rank = 1 + kernels.count_greater(x, n, logit);
  for (int64_t i = kernels.index_of(x, n, logit); i < token; ++i) rank += x[i] == logit ? 1 : 0;
  out.rank = static_cast<int32_t>(rank);
  k = std::min<int64_t>({k, n, kMaxLogprobs});
  out.num_top = static_cast<int>(k);
  if (k == 0) return;
  keep_best(kernels, x, n, k, out.top_ids);
  std::sort(out.top_ids, out.top_ids + k, Before{x});
  for (int64_t i = 0; i < k; ++i) {
    out.top_logprobs[i] = static_cast<float>(static_cast<double>(x[out.top_ids[i]]) - log_sum);
  }
}

}  // namespace

bool SamplingSettings::changes_logits() const {
  return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f ||
         !logit_bias.empty() || !allowed.empty() || !bad_words.empty() ||
         (min_tokens > 0 && !stop_ids.empty());
}

bool TokenHistory::output_ends_with(const std::vector<int32_t>& word, int64_t count) const {
  return num_output_tokens() >= count &&
         std::equal(word.begin(), word.begin() + count, ids + num_tokens - count);
}

SamplingScratch::SamplingScratch(int64_t n)
    : logits(static_cast<size_t>(n)),
      weights(static_cast<size_t>(n)),
      run_sums(static_cast<size_t>(n / kRun + 1)),
      counts(static_cast<size_t>(n)),
      candidate_ids(static_cast<size_t>(n)),
      bin_counts(kNumBins),
      bin_masses(kNumBins) {}

// One row's way from raw logits to a token.
class RowSampler {
 public:
  RowSampler(const float* logits, int64_t n, const SamplingSettings& settings, const TokenHistory& history,
             SamplingScratch& scratch)
      : raw_(logits), x_(logits), n_(n), settings_(settings), history_(history), scratch_(scratch) {}

  int32_t sample(TokenLogprobs* logprobs) {
    bool finite = false;
    raw_max_ = kernels_.max_of(raw_, n_, &finite);
    if (!finite) return kFailedToken;
    max_ = raw_max_;
    if (settings_.changes_logits()) {
      process_logits();
      max_ = kernels_.max_of(x_, n_, &finite);
      if (max_ == -INFINITY) return kMaskedToken;
      if (!(max_ >= -FLT_MAX && max_ <= FLT_MAX)) return kFailedToken;
    }
    const int32_t token =
        settings_.is_greedy() ? static_cast<int32_t>(kernels_.index_of(x_, n_, max_)) : draw();
    if (logprobs != nullptr && settings_.num_logprobs >= 0)
      fill_logprobs(kernels_, raw_, n_, raw_max_, token, settings_.num_logprobs, *logprobs);
    return token;
  }

 private:
  // Copies the logits and changes the copy.
  void process_logits() {
    float* x = scratch_.logits.data();
    std::memcpy(x, raw_, static_cast<size_t>(n_) * sizeof(float));
    x_ = x;
    for (const auto& [id, bias] : settings_.logit_bias) x[id] += bias;
    if (settings_.repetition_penalty != 1.0f) penalize_repetition(x);
    if (settings_.presence_penalty != 0.0f || settings_.frequency_penalty != 0.0f) penalize_frequency(x);
    if (!settings_.allowed.empty()) forbid_others(x);
    for (const auto& word : settings_.bad_words) {
      if (history_.output_ends_with(word, static_cast<int64_t>(word.size()) - 1)) x[word.back()] = -INFINITY;
    }
    if (history_.num_output_tokens() < settings_.min_tokens) {
      for (const int32_t id : settings_.stop_ids) x[id] = -INFINITY;
    }
  }

  // Words that allow all of their 32 tokens are passed over.
  void forbid_others(float* x) const {
    for (int64_t first = 0; first < n_; first += 32) {
      const uint32_t forbidden = ~settings_.allowed[static_cast<size_t>(first / 32)];
      const int64_t end = forbidden == 0 ? first : std::min(first + 32, n_);
      for (int64_t i = first; i < end; ++i) {
        if ((forbidden >> (i - first) & 1u) != 0) x[i] = -INFINITY;
      }
    }
  }

  // Each token of prompt and output once (Keskar et al., 2019): positive logits are divided, others
  // multiplied.
  void penalize_repetition(float* x) {
    const float penalty = settings_.repetition_penalty;
    for (int64_t i = 0; i < history_.num_tokens; ++i) {
      const int32_t id = history_.ids[i];
      if (id >= n_ || scratch_.counts[static_cast<size_t>(id)]++ != 0) continue;
      x[id] = x[id] > 0.0f ? x[id] / penalty : x[id] * penalty;
    }
    clear_counts(0);
  }

  void penalize_frequency(float* x) {
    for (int64_t i = history_.num_prompt_tokens; i < history_.num_tokens; ++i) {
      const int32_t id = history_.ids[i];
      if (id < n_) ++scratch_.counts[static_cast<size_t>(id)];
    }
    for (int64_t i = history_.num_prompt_tokens; i < history_.num_tokens; ++i) {
      const int32_t id = history_.ids[i];
      if (id >= n_ || scratch_.counts[static_cast<size_t>(id)] == 0) continue;
      const float count = static_cast<float>(scratch_.counts[static_cast<size_t>(id)]);
      x[id] -= settings_.frequency_penalty * count + settings_.presence_penalty;
      scratch_.counts[static_cast<size_t>(id)] = 0;
    }
  }

  void clear_counts(int64_t first) {
    for (int64_t i = first; i < history_.num_tokens; ++i) {
      if (history_.ids[i] < n_) scratch_.counts[static_cast<size_t>(history_.ids[i])] = 0;
    }
  }

  // Weights are 2^((logit - max) · log2(e) / temperature): the best token's is exactly 1.
  int32_t draw() {
    const float scale = kLog2E / settings_.temperature;
    const double total =
        kernels_.exp2_of(x_, n_, max_, scale, scratch_.weights.data(), scratch_.run_sums.data());
    const double u = uniform_draw(settings_.seed, settings_.choice,
                                  static_cast<uint64_t>(history_.num_output_tokens()), DrawKind::token);
    const bool cuts_k = settings_.top_k > 0 && settings_.top_k < n_;
    if (!cuts_k && settings_.top_p >= 1.0 && settings_.min_p <= 0.0) return draw_from_all(u * total);
    if (!cuts_k && settings_.top_p >= 1.0) return draw_from_ids(gather_heavy(), u);
    if (cuts_k && settings_.top_k <= kMostHeaped)
      return draw_from_ids(cut_mass(gather_best(settings_.top_k)), u);
    if (!cuts_k && settings_.top_p < 1.0) {
      const int64_t count = gather_mass(settings_.top_p * total);
      if (count > 0) return draw_from_ids(count, u);
    }
    Cut cut{-FLT_MAX, static_cast<int32_t>(n_)};
    if (cuts_k) cut = cut_after_count(cut, settings_.top_k);
    if (settings_.top_p < 1.0) cut = cut_after_mass(cut, settings_.top_p);
    return draw_from_kept(cut, u);
  }

  // The best k tokens as candidates, in no order; returns their number.
  int64_t gather_best(int64_t k) {
    keep_best(kernels_, x_, n_, k, scratch_.candidate_ids.data());
    return k;
  }

  // The tokens that min_p leaves as candidates, by ascending ids.
  int64_t gather_heavy() {
    const float* weights = scratch_.weights.data();
    const float below = std::nextafter(static_cast<float>(settings_.min_p), 0.0f);
    int64_t count = 0;
    for (int64_t i = kernels_.next_greater(weights, 0, n_, below); i < n_;
         i = kernels_.next_greater(weights, i + 1, n_, below)) {
      scratch_.candidate_ids[static_cast<size_t>(count++)] = static_cast<int32_t>(i);
    }
    return count;
  }

  // Cuts candidates to the best of them that hold top_p of their mass.
  int64_t cut_mass(int64_t count) {
    if (settings_.top_p >= 1.0) return count;
    double total = 0.0;
    int32_t* ids = scratch_.candidate_ids.data();
    std::sort(ids, ids + count, comes_before());
    for (int64_t i = 0; i < count; ++i) total += weight(ids[i]);
    return count_until(settings_.top_p * total, count);
  }

  // How many of the sorted candidates it takes to reach a mass; at least one.
  int64_t count_until(double target, int64_t count) const {
    int64_t kept = 0;
    for (double mass = 0.0; kept < count && (kept == 0 || mass < target); ++kept) {
      mass += weight(scratch_.candidate_ids[static_cast<size_t>(kept)]);
    }
    return kept;
  }

  // The best tokens that together reach a mass as candidates, found among those above a falling weight; 0
  // where that takes too many of them.
  int64_t gather_mass(double target) {
    int32_t* ids = scratch_.candidate_ids.data();
    const float* weights = scratch_.weights.data();
    for (float least = 0x1p-8f; least >= 0x1p-24f; least *= 0x1p-4f) {
      if (kernels_.count_greater(weights, n_, least) > kMostSorted) return 0;
      int64_t count = 0;
      double mass = 0.0;
      for (int64_t i = kernels_.next_greater(weights, 0, n_, least); i < n_;
           i = kernels_.next_greater(weights, i + 1, n_, least)) {
        ids[count++] = static_cast<int32_t>(i);
        mass += weight(static_cast<int32_t>(i));
      }
      if (mass < target) continue;
      std::sort(ids, ids + count, comes_before());
      return count_until(target, count);
    }
    return 0;
  }

  double weight(int32_t id) const { return static_cast<double>(scratch_.weights[static_cast<size_t>(id)]); }

  // Draws among candidates that min_p leaves, in order of their ids.
  int32_t draw_from_ids(int64_t count, double u) {
    int32_t* ids = scratch_.candidate_ids.data();
    if (!std::is_sorted(ids, ids + count)) std::sort(ids, ids + count);
    int64_t kept = 0;
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      if (weight(ids[i]) == 0.0 || weight(ids[i]) < settings_.min_p) continue;
      total += weight(ids[i]);
      ids[kept++] = ids[i];
    }
    double target = u * total;
    for (int64_t i = 0; i + 1 < kept; ++i) {
      if (target < weight(ids[i])) return ids[i];
      target -= weight(ids[i]);
    }
    return ids[kept - 1];
  }

  int32_t draw_from_all(double target) {
    int64_t run = 0;
    const int64_t num_runs = (n_ + kRun - 1) / kRun;
    for (; run + 1 < num_runs; ++run) {
      const double mass = static_cast<double>(scratch_.run_sums[static_cast<size_t>(run)]);
      if (target < mass) break;
      target -= mass;
    }
    int32_t last = kNoToken;
    for (int64_t i = run * kRun; i < n_; ++i) {
      const double weight = static_cast<double>(scratch_.weights[static_cast<size_t>(i)]);
      if (weight == 0.0) continue;
      last = static_cast<int32_t>(i);
      if (target < weight) return last;
      target -= weight;
    }
    return last != kNoToken ? last : static_cast<int32_t>(kernels_.index_of(x_, n_, max_));
  }

  int32_t draw_from_kept(const Cut& cut, double u) {
    int32_t* ids = scratch_.candidate_ids.data();
    int64_t count = 0;
    for (int64_t i = next_candidate(0, cut); i < n_; i = next_candidate(i + 1, cut)) {
      if (cut.keeps(x_[i], static_cast<int32_t>(i))) ids[count++] = static_cast<int32_t>(i);
    }
    return draw_from_ids(count, u);
  }

  // The next index whose logit is at least the cut's.
  int64_t next_candidate(int64_t first, const Cut& cut) const {
    return kernels_.next_greater(x_, first, n_, std::nextafter(cut.logit, -INFINITY));
  }

  int bin_of(float logit, float inverse_width) const {
    const float bin = (max_ - logit) * inverse_width;
    return bin < static_cast<float>(kNumBins - 1) ? static_cast<int>(bin) : kNumBins - 1;
  }

  // Sorts kept tokens into bins of falling logit; bins keep the order, so a cut lies in the bin where a
  // running count or mass crosses its target, and only that bin is sorted.
  float fill_bins(const Cut& cut) {
    std::fill(scratch_.bin_counts.begin(), scratch_.bin_counts.end(), 0);
    std::fill(scratch_.bin_masses.begin(), scratch_.bin_masses.end(), 0.0);
    float lowest = max_;
    for (int64_t i = 0; i < n_; ++i) {
      if (x_[i] >= -FLT_MAX) lowest = std::min(lowest, x_[i]);
    }
    lowest = std::max(lowest, cut.logit);
    const float range = max_ - lowest;
    const float inverse_width =
        range > 0.0f && range <= FLT_MAX ? static_cast<float>(kNumBins - 1) / range : 0.0f;
    for (int64_t i = 0; i < n_; ++i) {
      if (!cut.keeps(x_[i], static_cast<int32_t>(i))) continue;
      const size_t bin = static_cast<size_t>(bin_of(x_[i], inverse_width));
      ++scratch_.bin_counts[bin];
      scratch_.bin_masses[bin] += static_cast<double>(scratch_.weights[static_cast<size_t>(i)]);
    }
    return inverse_width;
  }

  int64_t gather_bin(const Cut& cut, int bin, float inverse_width) {
    int64_t count = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (cut.keeps(x_[i], static_cast<int32_t>(i)) && bin_of(x_[i], inverse_width) == bin) {
        scratch_.candidate_ids[static_cast<size_t>(count++)] = static_cast<int32_t>(i);
      }
    }
    return count;
  }

  Before comes_before() const { return {x_}; }

  Cut cut_after_count(const Cut& cut, int64_t count) {
    const float inverse_width = fill_bins(cut);
    int bin = 0;
    for (; bin + 1 < kNumBins && scratch_.bin_counts[static_cast<size_t>(bin)] < count; ++bin) {
      count -= scratch_.bin_counts[static_cast<size_t>(bin)];
    }
    if (scratch_.bin_counts[static_cast<size_t>(bin)] < count) return cut;  // fewer tokens than asked for
    const int64_t size = gather_bin(cut, bin, inverse_width);
    int32_t* ids = scratch_.candidate_ids.data();
    std::nth_element(ids, ids + count - 1, ids + size, comes_before());
    return {x_[ids[count - 1]], ids[count - 1]};
  }

  // The smallest set of best tokens whose share of the kept mass reaches `share`; at least one token.
  Cut cut_after_mass(const Cut& cut, double share) {
    const float inverse_width = fill_bins(cut);
    double total = 0.0;
    for (const double mass : scratch_.bin_masses) total += mass;
    double target = share * total;
    int bin = 0;
    for (; bin < kNumBins && (scratch_.bin_masses[static_cast<size_t>(bin)] < target || bin_is_empty(bin));
         ++bin) {
      target -= scratch_.bin_masses[static_cast<size_t>(bin)];
    }
    if (bin == kNumBins) return cut;
    const int64_t size = gather_bin(cut, bin, inverse_width);
    int32_t* ids = scratch_.candidate_ids.data();
    std::sort(ids, ids + size, comes_before());
    int64_t last = 0;
    for (; last + 1 < size; ++last) {
      const double weight = static_cast<double>(scratch_.weights[static_cast<size_t>(ids[last])]);
      if (weight >= target) break;
      target -= weight;
    }
    return {x_[ids[last]], ids[last]};
  }

  bool bin_is_empty(int bin) const { return scratch_.bin_counts[static_cast<size_t>(bin)] == 0; }

  const DecoderKernels& kernels_ = decoder_kernels();
  const float* raw_;
  const float* x_;  // raw_, or the changed copy
  int64_t n_;
  const SamplingSettings& settings_;
  const TokenHistory& history_;
  SamplingScratch& scratch_;
  float raw_max_ = 0.0f;
  float max_ = 0.0f;
};

int32_t sample_token(const float* logits, int64_t n, const SamplingSettings& settings,
                     const TokenHistory& history, SamplingScratch& scratch, TokenLogprobs* logprobs) {
  return RowSampler(logits, n, settings, history, scratch).sample(logprobs);
}

void score_token(const float* logits, int64_t n, int32_t token, int num_top, TokenLogprobs* logprobs) {
  const DecoderKernels& kernels = decoder_kernels();
  bool finite = false;
  const float top = kernels.max_of(logits, n, &finite);
  if (finite) fill_logprobs(kernels, logits, n, top, token, num_top, *logprobs);
}

}  // namespace everystop
