//! Families of metrics that are read at the scrape, written as OpenMetrics.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet},
    metrics::MetricType,
    registry::Unit,
};

/// Families as they are written.
pub(super) struct Page<'a>(pub(super) DescriptorEncoder<'a>);

impl Page<'_> {
    pub(super) fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        self.rows(
            name,
            None,
            help,
            MetricType::Counter,
            [([], count)],
            counter,
        )
    }

    pub(super) fn counter_of(
        &mut self,
        name: &str,
        unit: Unit,
        help: &str,
        count: u64,
    ) -> fmt::Result {
        let row = [([], count)];
        self.rows(name, Some(&unit), help, MetricType::Counter, row, counter)
    }

    pub(super) fn counters<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'static str, &'static str); N], u64)>,
    ) -> fmt::Result {
        self.rows(name, None, help, MetricType::Counter, rows, counter)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.rows(name, None, help, MetricType::Gauge, [([], value)], gauge)
    }

    pub(super) fn gauge_of(
        &mut self,
        name: &str,
        unit: Unit,
        help: &str,
        value: f64,
    ) -> fmt::Result {
        let row = [([], value)];
        self.rows(name, Some(&unit), help, MetricType::Gauge, row, gauge)
    }

    pub(super) fn gauges<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'static str, &'static str); N], f64)>,
    ) -> fmt::Result {
        self.rows(name, None, help, MetricType::Gauge, rows, gauge)
    }

    pub(super) fn rows<'v, T, const N: usize>(
        &mut self,
        name: &str,
        unit: Option<&Unit>,
        help: &str,
        kind: MetricType,
        rows: impl IntoIterator<Item = ([(&'static str, &'v str); N], T)>,
        write: fn(&mut MetricEncoder<'_>, T) -> fmt::Result,
    ) -> fmt::Result {
        let help = format!("{help}.");
        let mut family = self.0.encode_descriptor(name, &help, unit, kind)?;
        for (labels, value) in rows {
            if N == 0 {
                write(&mut family, value)?;
            } else {
                write(&mut family.encode_family(&labels)?, value)?;
            }
        }
        Ok(())
    }
}

pub(super) fn counter(encoder: &mut MetricEncoder<'_>, count: u64) -> fmt::Result {
    encoder.encode_counter::<NoLabelSet, _, u64>(&count, None)
}

pub(super) fn gauge(encoder: &mut MetricEncoder<'_>, value: f64) -> fmt::Result {
    encoder.encode_gauge(&value)
}

/// The unit of tokens.
pub(super) fn tokens() -> Unit {
    Unit::Other("tokens".to_owned())
}
