#include "relabel.h"

#include <c10/core/TensorImpl.h>

namespace neuron_sim {

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  c10::DispatchKeySet keys(key);
  // A zero tensor has no memory; without its key the next kernel would read a null pointer.
  if (C10_UNLIKELY(like._is_zerotensor())) {
    keys = keys.add(c10::DispatchKey::ZeroTensor);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (C10_UNLIKELY(like.is_conj())) {
    tensor._set_conj(true);
  }
  if (C10_UNLIKELY(like.is_neg())) {
    tensor._set_neg(true);
  }
  return tensor;
}

at::Tensor to_host_view(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && tensor.has_storage(),
      "the neuron device has strided tensors only, not ", tensor.layout(), "; call .to_dense() first");
  auto view = make_tensor(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
  if (C10_UNLIKELY(tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return view;
}

at::Tensor to_device(const at::Tensor& tensor, c10::DeviceIndex core) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && tensor.has_storage(),
      "the neuron device has strided tensors only, and this operator made a ", tensor.layout(), " one");
  return make_tensor(device_storage(tensor.storage(), core), kNeuronKey, tensor);
}

}  // namespace neuron_sim
