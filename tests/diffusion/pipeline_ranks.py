"""A pipeline over ranks that are threads: each runs the whole of it, with its part of every network."""

import threading

from tilewright.diffusion.components import Components
from tilewright.diffusion.pipelines import open_pipeline
from tilewright.parallel.rendezvous import open_rendezvous


def run_on_ranks(size, folder, prompt, **settings):
    """What `Pipeline.generate` gives on each rank, in fp32."""
    host = open_rendezvous(size)
    results, errors = [None] * size, []

    def run(rank):
        try:
            components = Components(folder, dtype="float32", pack_cache=False, group=host.make_group(rank))
            pipeline = open_pipeline(components)
            results[rank] = pipeline.generate(pipeline.limits.params(prompt, **settings))
        except Exception as error:
            errors.append(error)
            host.abort(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    finally:
        host.close()
    assert not errors, errors
    return results
