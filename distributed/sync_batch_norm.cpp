#include <mica/core/copy.h>
#include <mica/distributed/sync_batch_norm.h>
#include <mica/nn/batch_norm.h>

namespace mica::distributed {

void synchronize_batch_norms(nn::Module& module, const Group& group) {
  if (group.size() == 1) {
    return;
  }
  for (const nn::NamedModule& each : module.named_modules()) {
    if (each.type != nullptr && (*each.type == typeid(nn::BatchNorm1d) || *each.type == typeid(nn::BatchNorm2d) ||
                                 *each.type == typeid(nn::BatchNorm3d))) {
      static_cast<nn::BatchNorm*>(each.module)->gather = [group](const Tensor& mine) {
        Shape shape = mine.shape();
        shape.insert(0, group.size());
        const Tensor all = empty(shape, mine.dtype(), mine.device());
        group.all_gather(contiguous_data(mine), all);
        return all;
      };
    }
  }
}

}  // namespace mica::distributed
