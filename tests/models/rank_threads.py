"""The ranks of a model as threads of one process: each has its own part, group and kernel team, as a process would."""

from __future__ import annotations

import threading

from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.engine.ranks.ranks import RankCommand, StepMemory, follow, lead
from tilewright.engine.run.runner import build_runner
from tilewright.parallel.rendezvous import open_rendezvous


class RankThreads:
    """A model loaded in parts. `model` is the first rank's; cores that compute it take a `session` each."""

    def __init__(self, folder, dtype, size, block=1, **options):
        self.size, self.dtype = size, dtype
        self.host = open_rendezvous(size)
        groups = [self.host.make_group(rank) for rank in range(size)]
        name = str(dtype).removeprefix("torch.")
        self.networks = [
            load_network(folder, EngineOptions(dtype=name, **{"pack_cache": False, **options}), group, block=block)
            for group in groups
        ]
        self.model = self.networks[0].model
        self.turns = [threading.Lock() for _ in range(size)]
        self.sessions = []

    def session(self):
        """For `build_core`; None where there is one rank alone."""
        if self.size == 1:
            return None
        self.sessions.append(RankSession(self))
        return self.sessions[-1]

    def close(self):
        for session in self.sessions:
            session.close()
        self.host.close()


class RunnerInTurn:
    """A runner of one of several sessions whose threads share a rank's group, which one thread may use at a time.

    The first rank may begin a step of another session while this rank's thread still returns from the last collective.
    """

    def __init__(self, runner, turn):
        self.runner, self.turn = runner, turn

    def run(self):
        with self.turn:
            self.runner.run()

    def draft(self):
        with self.turn:
            self.runner.draft()


class RankSession:
    """Stands in for `engine.ranks.processes.Ranks`: the other ranks, each following the commands of one core."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.host = open_rendezvous(ranks.size, name="commands")
        self.groups = [self.host.make_group(rank) for rank in range(ranks.size)]
        self.memory = None
        self.threads = []
        self.errors = []

    def start_steps(self, settings, layout, media_buffer):
        memory = self.memory = StepMemory(layout, self.ranks.size)
        rows = None if media_buffer is None else media_buffer.rows
        for rank in range(1, self.ranks.size):
            model = self.ranks.networks[rank].model
            runner = build_runner(model, self.ranks.dtype, settings, memory.inputs, memory.draft_inputs, rows)
            in_turn = RunnerInTurn(runner, self.ranks.turns[rank])
            self.threads.append(threading.Thread(target=self._follow, args=(rank, in_turn), daemon=True))
        for thread in self.threads:
            thread.start()
        return memory

    def do(self, command, compute):
        return lead(self.groups[0], self.memory, command, compute)

    def close(self):
        if self.memory is not None:
            lead(self.groups[0], self.memory, RankCommand.stop, lambda: None)
            for thread in self.threads:
                thread.join(60)
                assert not thread.is_alive()
            self.memory.close()
        self.host.close()
        assert not self.errors, self.errors

    def _follow(self, rank, runner):
        try:
            follow(rank, self.groups[rank], self.memory, runner)
        except Exception as error:
            self.errors.append((rank, error))
            self.ranks.host.abort(rank)
