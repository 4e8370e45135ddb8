"""A picture on one NeuronCore with the transformer compiled as one graph: the first call compiles, later ones reuse it.

    python examples/neuron_compiled.py apple.png

Shapes are static. Another height or width compiles again, another number of steps does not. For a model of many equal
blocks, `pipe.transformer.compile_repeated_blocks(...)` with the same arguments takes a fraction of the time.
"""

import sys

import torch
from diffusers import Flux2KleinPipeline

from vitrail.bundled import model_folder

MODEL = model_folder()  # or "black-forest-labs/FLUX.2-klein-4B", with height and width of 1024


def main(output: str = "neuron_compiled.png") -> None:
    pipe = Flux2KleinPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.to("neuron")
    pipe.transformer.compile(backend="neuron", fullgraph=True, dynamic=False)

    # The warmup triggers the compilation.
    pipe(prompt="warmup", height=64, width=64, num_inference_steps=4, guidance_scale=1.0)

    image = pipe(
        prompt="a red apple",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).images[0]

    image.save(output)
    print(f"Saved {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
