"""The bus over Apache Kafka, by kafka-python: connections, topics; the only door to that library.

Its producer and consumer are in kafka_producer.py and kafka_consumer.py, which are given the library from here.
"""

from __future__ import annotations

import selectors
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .bus import (
    BUFFERED_MAX,
    BusError,
    BusMisconfigured,
    BusUnavailable,
    OnPartitions,
    Start,
    missing_extra,
)
from .clock import Clock
from .events import TOPICS, Topic
from .kafka_consumer import KafkaBusConsumer
from .kafka_producer import KafkaBusProducer
from .partitioning import plan_topics

DAY_MILLISECONDS = 24 * 3600 * 1000
RETENTION_DAYS: dict[Topic, int] = {"metrics": 7, "logs": 14, "dead-letters": 30}  # the others: for ever
METADATA_SECONDS_MAX = 30.0
RECONNECT_SECONDS_MAX = 1.0  # the library's own 30 s would make a broker's restart that much longer
REQUEST_SECONDS_MAX = 15.0


@dataclass(frozen=True, slots=True)
class KafkaSecurity:
    """How to reach a cluster that asks who we are; the defaults are a plain listener."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    key_password: str | None = None
    check_hostname: bool = True
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: str | None = None

    def __post_init__(self) -> None:
        if self.protocol.startswith("SASL") != (self.sasl_mechanism is not None):
            raise BusMisconfigured(
                f"security protocol {self.protocol} and SASL mechanism {self.sasl_mechanism} do not go together; "
                "SASL_PLAINTEXT and SASL_SSL need a mechanism, the others take none"
            )
        if self.sasl_mechanism is not None and not (self.sasl_username and self.sasl_password):
            raise BusMisconfigured(f"SASL {self.sasl_mechanism} needs a user name and a password")

    def options(self) -> dict[str, Any]:
        """kafka-python's names for these."""
        return {
            "security_protocol": self.protocol,
            "ssl_cafile": self.ca_file,
            "ssl_certfile": self.certificate_file,
            "ssl_keyfile": self.key_file,
            "ssl_password": self.key_password,
            "ssl_check_hostname": self.check_hostname,
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": self.sasl_password,
        }


class ClosingSelector(selectors.DefaultSelector):
    """Closes with itself every socket it was ever shown.

    A client that is closed while it connects leaves the half-made socket to the garbage collector.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[int, Any] = {}  # by descriptor: a number used again means that its socket was closed

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._shown[key.fd] = fileobj
        return key

    def close(self) -> None:
        super().close()
        for fileobj in self._shown.values():
            if isinstance(fileobj, socket.socket):
                fileobj.close()
        self._shown.clear()


class KafkaBus:
    """Connects when a producer, a consumer or topics are asked for; each connection is its own.

    Raises BusMisconfigured without the extra `kafka`. Without a broker, `producer`, `consumer` and `create_topics`
    raise BusUnavailable after `connect_seconds`.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        clock: Clock,
        prefix: str = "transom",
        client_id: str = "transom",
        security: KafkaSecurity | None = None,
        compression: Literal["lz4", "zstd", "gzip"] | None = "lz4",
        replication_factor: int = -1,  # -1: the cluster's own default
        buffered_max: int = BUFFERED_MAX,
        connect_seconds: float = 10.0,
        commit_seconds: float = 10.0,
        session_timeout_seconds: float = 10.0,
        stall_seconds: float = 20.0,
        delivery_seconds: float = 600.0,
    ) -> None:
        self._kafka = _library()
        self._servers = bootstrap_servers
        self._clock = clock
        self._prefix = prefix
        self._client_id = client_id
        self._security = security or KafkaSecurity()
        self._compression = compression
        self._replication_factor = replication_factor
        self._buffered_max = buffered_max
        self._connect_seconds = connect_seconds
        self._commit_seconds = commit_seconds
        self._session_timeout_seconds = session_timeout_seconds
        self._stall_seconds = stall_seconds
        self._delivery_seconds = delivery_seconds

    def producer(self) -> KafkaBusProducer:
        return KafkaBusProducer(
            self._connect_producer, self._kafka, self._clock, self._prefix, self._servers, self._buffered_max
        )

    def consumer(
        self,
        group: str,
        topics: Sequence[Topic],
        *,
        start: Start = "earliest",
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> KafkaBusConsumer:
        return KafkaBusConsumer(
            lambda: self._connect_consumer(f"{self._prefix}.{group}"),
            self._kafka,
            self._clock,
            prefix=self._prefix,
            servers=self._servers,
            topics=tuple(topics),
            start=start,
            on_assign=on_assign,
            on_revoke=on_revoke,
            commit_seconds=self._commit_seconds,
            stall_seconds=self._stall_seconds,
        )

    def create_topics(self, partitions: int) -> None:
        admin = self._connect(self._kafka.KafkaAdminClient, {})
        try:
            missing = plan_topics(self._partition_counts(admin), partitions)
            if missing:
                created = admin.create_topics(
                    {f"{self._prefix}.{topic}": self._topic_options(topic, n) for topic, n in missing.items()},
                    raise_errors=False,
                )
                for topic in created["topics"]:
                    # Somebody else may create the same ones just now; the check below judges what is there then.
                    if topic["error_code"] not in (0, self._kafka.errors.TopicAlreadyExistsError.errno):
                        raise BusMisconfigured(
                            f"Kafka did not create {topic['name']}: "
                            f"{topic.get('error_message') or self._kafka.errors.for_code(topic['error_code']).__name__}"
                        )
                admin.wait_for_topics([f"{self._prefix}.{topic}" for topic in missing])
                plan_topics(self._partition_counts(admin), partitions)
        except self._kafka.errors.KafkaError as error:
            raise self._explain(error) from error
        finally:
            admin.close()

    def close(self) -> None:
        """Nothing is held here: producers and consumers have their own connections."""

    def _topic_options(self, topic: Topic, partitions: int) -> dict[str, Any]:
        days = RETENTION_DAYS.get(topic)
        return {
            "num_partitions": partitions,
            "replication_factor": self._replication_factor,
            "configs": {
                "retention.ms": "-1" if days is None else str(days * DAY_MILLISECONDS),
                "retention.bytes": "-1",
                # Retention must not depend on the clocks of a thousand nodes.
                "message.timestamp.type": "LogAppendTime",
            },
        }

    def _partition_counts(self, admin: Any) -> dict[Topic, int]:
        names = {f"{self._prefix}.{topic}": topic for topic in TOPICS}
        return {
            names[found["name"]]: len(found["partitions"])
            for found in admin.describe_topics(list(names))
            if found["error_code"] == 0
        }

    def _connect_producer(self) -> Any:
        return self._connect(
            self._kafka.KafkaProducer,
            {
                "acks": "all",
                "enable_idempotence": True,
                "compression_type": self._compression,
                "linger_ms": 5,
                "batch_size": 128 * 1024,
                "max_block_ms": 250,  # only our own thread waits for it
                "delivery_timeout_ms": int(self._delivery_seconds * 1000),
                "allow_auto_create_topics": False,
            },
        )

    def _connect_consumer(self, group: str) -> Any:
        from kafka.coordinator.assignors.range import RangePartitionAssignor

        return self._connect(
            self._kafka.KafkaConsumer,
            {
                "group_id": group,
                "enable_auto_commit": False,
                "auto_offset_reset": "earliest",
                "partition_assignment_strategy": (RangePartitionAssignor,),
                "session_timeout_ms": int(self._session_timeout_seconds * 1000),
                "heartbeat_interval_ms": int(self._session_timeout_seconds * 100),
                "allow_auto_create_topics": False,
            },
        )

    def _connect(self, factory: Callable[..., Any], options: dict[str, Any]) -> Any:
        """One client of the library, within `connect_seconds`; a half-made one is taken down again."""
        from kafka.net.compat import KafkaNetClient

        made: list[Any] = []

        def client(**configs: Any) -> Any:
            made.append(KafkaNetClient(**configs))
            return made[-1]

        milliseconds = int(self._connect_seconds * 1000)
        try:
            return factory(
                bootstrap_servers=self._servers.split(","),
                client_id=self._client_id,
                bootstrap_timeout_ms=milliseconds,
                request_timeout_ms=int(REQUEST_SECONDS_MAX * 1000),
                reconnect_backoff_max_ms=int(RECONNECT_SECONDS_MAX * 1000),
                metadata_max_age_ms=int(METADATA_SECONDS_MAX * 1000),
                kafka_client=client,
                selector=ClosingSelector,
                **options,
                **self._security.options(),
            )
        except (self._kafka.errors.KafkaError, OSError, ValueError, RuntimeError) as error:
            for half_made in made:
                half_made.close()
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> BusError:
        errors = self._kafka.errors
        if isinstance(error, errors.KafkaTimeoutError | errors.KafkaConnectionError):
            return BusUnavailable(
                f"no Kafka broker at {self._servers} answered within {self._connect_seconds:g} s; "
                "is it running, and is the address right?"
            )
        if isinstance(error, RuntimeError) and "codec" in str(error):
            return missing_extra("kafka", f"compression {self._compression}")
        if isinstance(error, errors.KafkaError) and error.retriable:
            return BusUnavailable(f"Kafka at {self._servers} cannot do this now: {error}")
        return BusMisconfigured(f"Kafka at {self._servers} refused: {type(error).__name__}: {error}")


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            # It reads its schemas by a function that Python 3.11 calls deprecated (and 3.13 does not).
            warnings.simplefilter("ignore", DeprecationWarning)
            import kafka
            import kafka.errors
    except ImportError as error:
        raise missing_extra("kafka", "the Kafka bus") from error
    return kafka
