"""Config of a run as validated sections: reading YAML, overrides, error sentences."""

from unipar.config.cell import SHARDS as SHARDS
from unipar.config.cell import Cell as Cell
from unipar.config.cell import Precision as Precision
from unipar.config.cell import Shard as Shard
from unipar.config.config import Config as Config
from unipar.config.section import Section as Section
from unipar.config.sections.batch import BatchSizes as BatchSizes
