#include <algorithm>

#include <mica/core/creation.h>
#include <mica/core/detail/memory.h>
#include <mica/core/dispatch.h>
#include <mica/optim/detail/multi_tensor.h>

namespace mica::kernels {

void MultiTensorList::add(const MultiTensorPart& kind, const MultiTensorEntry& entry) {
  const auto at =
      std::find_if(parts_.begin(), parts_.end(), [&](const MultiTensorPart& part) { return part.has_kind_of(kind); });
  const std::size_t part = at - parts_.begin();
  if (at == parts_.end()) {
    parts_.push_back({.dtype = kind.dtype, .states = kind.states, .master = kind.master});
    by_part_.emplace_back();
  }
  by_part_[part].push_back(entry);
}

void MultiTensorList::finish(Device device) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    MultiTensorPart& part = parts_[i];
    part.first_entry = entries();
    part.first_chunk = chunks_;
    part.entries = static_cast<std::int64_t>(by_part_[i].size());
    for (MultiTensorEntry& entry : by_part_[i]) {
      entry.first_chunk = chunks_;
      entry.first_block = part.blocks;
      part.blocks += (entry.numel + block(part.dtype) - 1) / block(part.dtype);
      chunks_ += (entry.numel + kChunk - 1) / kChunk;
      entries_.push_back(entry);
    }
    part.chunks = chunks_ - part.first_chunk;
  }
  by_part_.clear();
  if (device.is_cuda() && !entries_.empty()) {
    const std::size_t bytes = entries_.size() * sizeof(MultiTensorEntry);
    device_table_ = mica::empty({static_cast<std::int64_t>(bytes)}, uint8, device);
    on_device(device, [&](auto d) { memory::write(d, device_table_.raw_data(), entries_.data(), bytes); });
  }
}

const MultiTensorEntry* MultiTensorList::table() const {
  return device_table_.defined() ? reinterpret_cast<const MultiTensorEntry*>(device_table_.raw_data())
                                 : entries_.data();
}

}  // namespace mica::kernels
