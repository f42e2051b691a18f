#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "random.hpp"
#include "sampling.hpp"

namespace everystop {
namespace {

std::vector<float> changed_logits(const float* logits, int64_t n, const SamplingSettings& settings,
                                  const TokenHistory& history) {
  std::vector<float> x(logits, logits + n);
  for (const auto& [id, bias] : settings.logit_bias) x[static_cast<size_t>(id)] += bias;
  const std::set<int32_t> seen(history.ids, history.ids + history.num_tokens);
  for (const int32_t id : seen) {
    float& value = x[static_cast<size_t>(id)];
    value = value > 0.0f ? value / settings.repetition_penalty : value * settings.repetition_penalty;
  }
  std::map<int32_t, int> counts;
  for (int64_t i = history.num_prompt_tokens; i < history.num_tokens; ++i) ++counts[history.ids[i]];
  for (const auto& [id, count] : counts) {
    x[static_cast<size_t>(id)] -=
        settings.frequency_penalty * static_cast<float>(count) + settings.presence_penalty;
  }
  for (int64_t i = 0; i < n && !settings.allowed.empty(); ++i) {
    if ((settings.allowed[static_cast<size_t>(i / 32)] >> (i % 32) & 1u) == 0)
      x[static_cast<size_t>(i)] = -INFINITY;
  }
  const std::vector<int32_t> output(history.ids + history.num_prompt_tokens,
                                    history.ids + history.num_tokens);
  for (const std::vector<int32_t>& word : settings.bad_words) {
    std::vector<int32_t> attempt = output;
    attempt.push_back(word.back());
    const bool comes_about =
        attempt.size() >= word.size() && std::equal(word.rbegin(), word.rend(), attempt.rbegin());
    if (comes_about) x[static_cast<size_t>(word.back())] = -INFINITY;
  }
  if (history.num_output_tokens() < settings.min_tokens) {
    for (const int32_t id : settings.stop_ids) x[static_cast<size_t>(id)] = -INFINITY;
  }
  return x;
}

}  // namespace

int32_t sample_token_naive(const float* logits, int64_t n, const SamplingSettings& settings,
                           const TokenHistory& history) {
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(logits[i])) return kFailedToken;
  }
  const std::vector<float> x = changed_logits(logits, n, settings, history);
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  const double best = static_cast<double>(x[static_cast<size_t>(order[0])]);
  if (best == -INFINITY) return kMaskedToken;
  if (!std::isfinite(best)) return kFailedToken;
  if (settings.is_greedy()) return order[0];

  if (settings.top_k > 0 && settings.top_k < n) order.resize(static_cast<size_t>(settings.top_k));
  std::vector<double> weights;
  for (const int32_t id : order) {
    weights.push_back(std::exp((static_cast<double>(x[static_cast<size_t>(id)]) - best) /
                               static_cast<double>(settings.temperature)));
  }
  if (settings.top_p < 1.0) {
    const double target = settings.top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
    size_t kept = 0;
    for (double mass = 0.0; kept < order.size() && (kept == 0 || mass < target); ++kept)
      mass += weights[kept];
    order.resize(kept);
  }
  std::map<int32_t, double> kept;  // by ascending id, as the draw walks
  for (size_t i = 0; i < order.size(); ++i) {
    if (weights[i] >= settings.min_p) kept[order[i]] = weights[i];
  }
  double total = 0.0;
  for (const auto& [id, weight] : kept) total += weight;
  double target = total * uniform_draw(settings.seed, settings.choice,
                                       static_cast<uint64_t>(history.num_output_tokens()), DrawKind::token);
  for (const auto& [id, weight] : kept) {
    if (target < weight) return id;
    target -= weight;
  }
  return kept.rbegin()->first;
}

}  // namespace everystop
