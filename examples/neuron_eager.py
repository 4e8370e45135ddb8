"""A picture on one NeuronCore: the whole pipeline moves to the device, and every operator runs as it comes.

    python examples/neuron_eager.py apple.png

On a machine without Trainium, install neuron-sim first; nothing here changes.
"""

import sys

import torch
from diffusers import Flux2KleinPipeline

from vitrail.bundled import model_folder

MODEL = model_folder()  # or "black-forest-labs/FLUX.2-klein-4B", with height and width of 1024


def main(output: str = "neuron_eager.png") -> None:
    pipe = Flux2KleinPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.to("neuron")

    # A generator of the host gives the same start on every device.
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
