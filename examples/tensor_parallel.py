"""A picture with a transformer that is sharded in memory, over eight NeuronCores: two chips of a trn2.48xlarge.

    torchrun --nproc_per_node=8 examples/tensor_parallel.py apple.png

`enable_parallelism` cuts the weights while they are on the host, so that only a slice travels to each core. The degree
must divide the attention heads; the bundled model has eight.
"""

import sys

import torch
import torch.distributed as dist
import torch_neuronx  # noqa: F401  registers torch.neuron also where autoloading is off
from diffusers import Flux2KleinPipeline, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from vitrail.bundled import model_folder

MODEL = model_folder()  # or "black-forest-labs/FLUX.2-klein-9B", with height and width of 1024


def main(output: str = "tensor_parallel.png") -> None:
    dist.init_process_group(backend="neuron")
    device = torch.neuron.current_device()
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("neuron", list(range(degree)))

    pipe = Flux2KleinPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16)

    # Whole on every rank.
    pipe.text_encoder = pipe.text_encoder.to(device)
    pipe.vae = pipe.vae.to(device)

    # Sharded while on the host, then moved.
    pipe.transformer.enable_parallelism(config=TensorParallelConfig(mesh=mesh))
    pipe.transformer = pipe.transformer.to(device)
    torch.neuron.synchronize()

    image = pipe(
        prompt="a red apple",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).images[0]

    if rank == 0:
        image.save(output)
        print(f"Saved {output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
