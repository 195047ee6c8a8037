// Every kernel of every level against the portable one, on seeded random calls: equal bits where the levels promise
// them, a tolerance where products are fused. Levels that widen another give the bits of that one everywhere.
// Prints a line for each kernel and level; exit status 1 after a difference. `--spoil` changes one result of each
// kernel, and must end with 1.
#include <cstdio>
#include <string>

#include "cases.hpp"

namespace moesaic {
namespace {

constexpr int kSeeds = 60;

struct Case {
  const char* name;
  Floats (*run)(const LevelTable&, Random&);
  float tolerance;  // of the greatest result; 0: equal bits
  bool has_bfloat16_weights = false;
};

// A level with products of bfloat16 pairs of its own: everywhere else it has the bits of the level that it widens.
bool has_own_pairs(const LevelTable& level) { return level.name == std::string("avx512-bf16"); }

Floats packed_experts(const LevelTable& level, Random& random) { return experts(level, random, true); }
Floats float_experts(const LevelTable& level, Random& random) { return experts(level, random, false); }

// Sums of up to some hundred terms, and a result that is rounded to bfloat16, once or through a layer of experts.
const Case kCases[] = {
    {"matmul of packed weights", packed_matmul, 0.0f}, {"matmul of floats", float_matmul, 8e-3f, true},
    {"activation", activation, 0.0f},                  {"softmax", softmax, 0.0f},
    {"norm", norm, 0.0f},                              {"rotation", rotation, 0.0f},
    {"gate", gate, 0.0f},                              {"convolution", convolution, 0.0f},
    {"delta rule", delta, 0.0f},                       {"write of keys and values", kv_write, 0.0f},
    {"attention", attention, 8e-3f},                   {"experts of packed weights", packed_experts, 0.0f},
    {"experts of floats", float_experts, 2e-2f, true},
};

bool is_same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

// Empty where two results agree.
std::string difference(const Floats& found, const Floats& expected, float tolerance) {
  if (found.size() != expected.size()) return "another number of results";
  float greatest = 0.0f;
  for (const float one : expected)
    if (std::isfinite(one)) greatest = std::max(greatest, std::fabs(one));
  for (size_t i = 0; i < found.size(); ++i) {
    if (is_same(found[i], expected[i]) || std::fabs(found[i] - expected[i]) <= tolerance * greatest) continue;
    char text[120];
    std::snprintf(text, sizeof text, "result %zu of %zu is %.9g, not %.9g (greatest %.9g)", i, found.size(),
                  static_cast<double>(found[i]), static_cast<double>(expected[i]), static_cast<double>(greatest));
    return text;
  }
  return "";
}

bool report(const char* name, const LevelTable& level, const char* against, const std::string& problem) {
  std::printf("%-26s %-13s %-22s %s\n", name, level.name, against, problem.empty() ? "ok" : problem.c_str());
  return problem.empty();
}

// Against `oracle`, with the case's own tolerance or with none.
bool compare(const Case& of, const LevelTable& level, const LevelTable& oracle, float tolerance, bool is_spoilt) {
  std::string problem;
  for (int seed = 0; seed < kSeeds && problem.empty(); ++seed) {
    Random random(static_cast<uint64_t>(seed)), again(static_cast<uint64_t>(seed));
    Floats found = of.run(level, random);
    const Floats expected = of.run(oracle, again);
    if (is_spoilt) found[0] = found[0] == 0.0f ? 1.0f : found[0] * (1.0f + 0x1p-4f) + 1.0f;
    problem = difference(found, expected, tolerance);
    if (!problem.empty()) problem = "seed " + std::to_string(seed) + ": " + problem;
  }
  const std::string against = (tolerance > 0.0f ? "close to " : "equals ") + std::string(oracle.name);
  return report(of.name, level, against.c_str(), problem);
}

// Of greatest products and of one sign: what saturates does so here.
bool extremes(const LevelTable& level) {
  bool is_right = true;
  for (const int64_t bits : {8, 4})
    for (const int sign : {1, -1}) {
      Random random(1);
      const int64_t width = 64, rows = 5;
      Weight weight = packed_weight(random, 16, width, 1, bits, 32, 1);
      weight.matrix.has_zeros = false;
      weight.data.assign(static_cast<size_t>(weight.matrix.weight_bytes()), bits == 8 ? 0x80 : 0xff);
      weight.matrix.data = weight.data.data();
      for (int64_t at = 0; at < weight.matrix.weight_bytes(); at += weight.matrix.group_bytes())
        for (int64_t i = 0; i < kPanelRows; ++i) {
          const uint16_t one = 0x3c00;
          std::memcpy(&weight.data[static_cast<size_t>(at + 2 * i)], &one, sizeof one);
        }
      const Floats x(static_cast<size_t>(rows * width), static_cast<float>(127 * sign));
      const float product = static_cast<float>(64 * 127 * sign * (bits == 8 ? -128 : 7));
      const Floats expected(static_cast<size_t>(rows * 16), product);
      const Floats found = multiply(level, weight.matrix, x, rows, Kind::kFloat32, Kind::kFloat32);
      const std::string name = "extremes of int" + std::to_string(bits) + (sign < 0 ? ", negative" : "");
      is_right &= report(name.c_str(), level, "exact", difference(found, expected, 0.0f));
    }
  return is_right;
}

// (1 + 2^-12)^2 has a tail that a rounding of its own drops: float matmuls keep it where they fuse, and nothing else
// may. The packed sum of two blocks is the same with products of scales.
bool contraction(const LevelTable& level) {
  const bool is_fused = level.name != std::string("portable");
  Floats x(16), w(16);
  x[0] = -1.0f, w[0] = 1.0f + 0x1p-11f;
  x[8] = w[8] = 1.0f + 0x1p-12f;
  const Matrix weight = Matrix::of_floats(w.data(), 1, 16, 1, Kind::kFloat32, 16);
  const Floats found = multiply(level, weight, x, 1, Kind::kFloat32, Kind::kFloat32);
  bool is_right = report("contraction, matmul", level, is_fused ? "fused" : "apart",
                         difference(found, {is_fused ? 0x1p-24f : 0.0f}, 0.0f));
  // x cos - y sin with cos = x = 1 + 2^-12, sin = 1 + 2^-11, y = 1.
  const float pair[2] = {1.0f + 0x1p-12f, 1.0f}, cosine = 1.0f + 0x1p-12f, sine = 1.0f + 0x1p-11f;
  Floats turned(2);
  level.rotate({pair, &cosine, &sine, turned.data(), 1, 1, 2, 1, 2, 2, false, Kind::kFloat32}, 0, 1);
  turned.resize(1);
  is_right &= report("contraction, rotation", level, "apart", difference(turned, {0.0f}, 0.0f));
  return is_right;
}

int run(bool is_spoilt) {
  std::vector<const LevelTable*> levels = levels_here();
#if defined(MOESAIC_EMULATED)
  levels = {&portable_level(), &avx2_level(), &avx512_level(), &avx512_vnni_level(), &avx512_bf16_level()};
#endif
  bool is_right = true;
  for (size_t i = 0; i < levels.size(); ++i) {
    is_right &= extremes(*levels[i]);
    is_right &= contraction(*levels[i]);
    for (const Case& of : kCases) {
      if (i >= 1) is_right &= compare(of, *levels[i], *levels[0], of.tolerance, is_spoilt);
      const bool is_own = of.has_bfloat16_weights && has_own_pairs(*levels[i]);
      if (i >= 2 && of.tolerance > 0.0f && !is_own) is_right &= compare(of, *levels[i], *levels[1], 0.0f, is_spoilt);
    }
  }
  return is_right ? 0 : 1;
}

}  // namespace
}  // namespace moesaic

int main(int count, char** words) { return moesaic::run(count > 1 && std::string(words[1]) == "--spoil"); }
