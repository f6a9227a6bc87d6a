"""A pipeline over ranks that are threads: each runs the whole of it, with its part of every network."""

from components import on_ranks

from tilewright.diffusion.pipelines import open_pipeline


def run_on_ranks(size, folder, prompt, **settings):
    """What `Pipeline.generate` gives on each rank, in fp32."""

    def generate(group):
        pipeline = open_pipeline(folder, dtype="float32", pack_cache=False, group=group)
        return pipeline.generate(pipeline.limits.params(prompt, **settings))

    return on_ranks(size, lambda group: group, generate)
