"""A picture with the transformer sharded over NeuronCores as it is loaded, by diffusers' own TensorParallelConfig.

    torchrun --nproc_per_node=2 examples/neuron_tensor_parallel.py apple.png

One process a core. Each rank reads its own slice of the transformer; the other parts are whole on every rank.
"""

import sys

import torch
import torch.distributed as dist
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from vitrail.bundled import model_folder

MODEL = model_folder()


def main(output: str = "neuron_tensor_parallel.png") -> None:
    # The process group comes first: it binds this process to its core.
    dist.init_process_group(backend="neuron")
    mesh = DeviceMesh("neuron", list(range(dist.get_world_size())))
    device = torch.neuron.current_device()

    transformer = Flux2Transformer2DModel.from_pretrained(
        MODEL, subfolder="transformer", dtype=torch.bfloat16, parallel_config=TensorParallelConfig(mesh=mesh)
    )
    pipe = Flux2KleinPipeline.from_pretrained(MODEL, transformer=transformer, dtype=torch.bfloat16)
    pipe.to(device)

    # All ranks draw the same latents, because they take part in the same picture.
    image = pipe(
        prompt="a red apple",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).images[0]

    if dist.get_rank() == 0:
        image.save(output)
        print(f"Saved {output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
