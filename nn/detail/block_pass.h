#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/core/progress.h>
#include <mica/nn/checkpoint.h>
#include <mica/nn/key_value_cache.h>
#include <mica/nn/packed_documents.h>
#include <mica/ops/attention/attention.h>

namespace mica::nn::detail {

/// A pass of tokens (B, T) through the blocks of a language model, with a cache or without. Begins the cache's step,
/// and reports how far a prompt has been read. `recompute`: without a cache, blocks are checkpoints.
class BlockPass {
 public:
  BlockPass(const char* model, const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed,
            std::int64_t blocks, bool recompute)
      : cache_(cache), recompute_(recompute && cache == nullptr) {
    if (cache_ != nullptr) {
      check(!packed.positions.defined() && !packed.documents.defined(),
            "{}: a KeyValueCache cannot be used with packed documents", model);
      cache_->begin(tokens.size(0), tokens.size(1));
      if (tokens.size(1) > 1) {
        progress_.emplace("reading the prompt", blocks);
      }
    }
    positions_ = cache_ == nullptr ? packed.positions : cache_->positions();
    mask_ = packed.documents.defined() ? document_mask(packed.documents) : Tensor{};
  }

  const Tensor& positions() const { return positions_; }  ///< of the tokens; undefined: they count from 0
  const Tensor& mask() const { return mask_; }            ///< of packed documents, or undefined

  /// block(inputs…, its layer of the cache). Call it for one block after another.
  template <class Block, class... In>
  auto operator()(const Block& block, const In&... inputs) {
    auto y = recompute_ ? nn::checkpoint(block, inputs...) : block(inputs..., CachedLayer{cache_, layer_++});
    if (progress_) {
      progress_->advance();
    }
    return y;
  }
  /// Ends the cache's step, after the last block.
  void end() const {
    if (cache_ != nullptr) {
      cache_->end();
    }
  }

 private:
  KeyValueCache* cache_;
  bool recompute_;
  std::int64_t layer_ = 0;
  std::optional<ProgressTask> progress_;
  Tensor positions_;
  Tensor mask_;
};

/// The window of each block's attention, as KeyValueCache::Config::windows.
template <class Blocks>
std::vector<std::int64_t> windows_of(const Blocks& blocks) {
  std::vector<std::int64_t> windows;
  for (const auto& block : blocks) {
    windows.push_back(block.self_attn.window);
  }
  return windows;
}

}  // namespace mica::nn::detail
