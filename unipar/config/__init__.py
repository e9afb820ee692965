"""Config of a run as validated sections: reading YAML, overrides, error sentences."""

from unipar.config.config import Config as Config
from unipar.config.sections.batch import BatchSizes as BatchSizes
from unipar.config.sections.section import Section as Section
from unipar.config.sections.strategy import SHARDS as SHARDS
from unipar.config.sections.strategy import Precision as Precision
from unipar.config.sections.strategy import Shard as Shard
from unipar.config.sections.strategy import Strategy as Strategy
