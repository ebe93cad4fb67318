"""External blocks: move the command streams and weights of Ethos-U delegates to a data file (``.ptd``).

A block is a part of the delegate's payload, such as the command stream. The data file is deployed apart from the
program: in another memory, or by updates over the air. Each moved block becomes named data, in the wire format that
ExecuTorch's own ``EthosUBackend`` reads too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from arm_backend_core.backends.payload import COMMANDS_CHECKSUM_KEY, WEIGHTS_CHECKSUM_KEY, checksum_spec
from arm_backend_core.compilation_log import delegate_record, set_delegate_record
from arm_recipes._internal.executorch_programs import arm_delegates_of, move_named_data, store_named_data
from arm_recipes.runtime.ethosu_blocks import ALIGNMENT, BlockName, read_blocks, replace_blocks
from arm_recipes.runtime.payload_parts import COMMANDS_PREFIX, WEIGHTS_PREFIX, content_key
from arm_recipes.stages.edge.shared_weights import replace_payload

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.lowered_backend_module import LoweredBackendModule

#: Tag of the data file in ExecuTorch's store of named data.
DATA_FILE_TAG: Final = "arm_recipes"
#: For each block: (prefix of its key in the named data, key of the compile spec that holds its checksum).
_KEYS_OF_BLOCK: Final = {
    BlockName.COMMANDS: (COMMANDS_PREFIX, COMMANDS_CHECKSUM_KEY),
    BlockName.WEIGHTS: (WEIGHTS_PREFIX, WEIGHTS_CHECKSUM_KEY),
}
_BLOCK_OF_OPTION: Final = {"commands": BlockName.COMMANDS, "weights": BlockName.WEIGHTS}


@dataclass(frozen=True)
class ExternalizeBlocks:
    """Edge manager pass: move blocks of the Ethos-U delegates to the data file.

    Args:
        blocks: names of the blocks in the option ``external``: "commands", "weights".
    """

    blocks: tuple[str, ...]

    def __call__(self, manager: EdgeProgramManager) -> Sequence[Any]:
        """Move the blocks of every method."""
        for method in sorted(manager.methods):
            for module in arm_delegates_of(manager, method):
                if module.backend_id == "EthosUBackend":
                    self._externalize(manager, module)
        return []

    def _externalize(self, manager: EdgeProgramManager, module: LoweredBackendModule) -> None:
        blocks = read_blocks(memoryview(module.processed_bytes))
        keys, specs, sizes = {}, [], dict[str, int]()
        for name in map(_BLOCK_OF_OPTION.__getitem__, self.blocks):
            prefix, checksum_key = _KEYS_OF_BLOCK[name]
            if blocks[name].external:  # weights that methods share
                key = blocks[name].key
                sizes[key] = move_named_data(manager, key, DATA_FILE_TAG)
                continue
            data = bytes(blocks[name].data)
            key = content_key(data, prefix)
            store_named_data(manager, key, data, ALIGNMENT, DATA_FILE_TAG)
            keys[name], sizes[key] = key.encode(), len(data)
            specs.append(checksum_spec(data, checksum_key))
        if keys:
            replace_payload(module, replace_blocks(module.processed_bytes, keys, external=keys), specs)
        record = delegate_record(module)
        assert record is not None
        set_delegate_record(module, replace(record, external_blocks=sizes))
