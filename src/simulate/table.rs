//! The report as a table for a terminal: plain ASCII, a line for each policy.

use std::fmt::Write as _;

use super::report::{PolicyReport, Report};
use crate::harness::table::count;

/// A column: its head in two lines, and what stands in it.
type Column = ([&'static str; 2], fn(&PolicyReport) -> String);

const COLUMNS: [Column; 11] = [
    (["% of", "reachable"], |p| percent(p.hits_of_reachable)),
    (["% of", "pooled"], |p| percent(p.hits_of_pooled)),
    (["hit", "rate %"], |p| percent(p.hit_rate)),
    (["makespan", "s"], |p| format!("{:.0}", p.makespan_seconds)),
    (["90% of", "sessions s"], |p| {
        format!("{:.0}", p.sessions_90_seconds)
    }),
    (["turn p50", "s"], |p| {
        format!("{:.2}", p.latency_seconds.p50)
    }),
    (["p95", "s"], |p| format!("{:.2}", p.latency_seconds.p95)),
    (["p99", "s"], |p| format!("{:.2}", p.latency_seconds.p99)),
    (["load", "max/mean"], |p| {
        format!("{:.2}", p.balance.in_flight)
    }),
    (["moves", ""], |p| count(p.moves.total)),
    (["tokens", "prefilled again"], |p| {
        count(p.reprefilled_tokens)
    }),
];

impl Report {
    /// All policies side by side.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let (w, f) = (&self.workload, &self.fleet);
        let _ = writeln!(
            out,
            "{}: {} sessions, {} turns, {} prompt tokens, {} generated; {}",
            w.trace,
            count(w.sessions as u64),
            count(w.turns as u64),
            count(w.prompt_tokens),
            count(w.output_tokens),
            w.arrival
        );
        let _ = writeln!(
            out,
            "{} replicas x {} ranks, {}, {} KV tokens a rank, pages of {}; seed {}",
            f.replicas,
            f.ranks_per_replica,
            f.accelerator,
            count(f.kv_tokens_per_rank as u64),
            f.page_size,
            self.seed
        );
        let _ = write!(
            out,
            "reachable: {} % of prompt tokens",
            percent(w.reachable_rate)
        );
        if let Some(rate) = w.reachable_block_rate {
            let _ = write!(out, ", {} % of blocks", percent(rate));
        }
        out.push_str("\n\n");
        self.columns(&mut out);
        self.effects(&mut out);
        out
    }

    fn columns(&self, out: &mut String) {
        let names = self.policies.iter().map(|p| p.policy.len());
        let first = names.max().unwrap_or(0).max("policy".len());
        let cells: Vec<Vec<String>> = self
            .policies
            .iter()
            .map(|policy| COLUMNS.iter().map(|(_, of)| of(policy)).collect())
            .collect();
        let widths: Vec<usize> = COLUMNS
            .iter()
            .enumerate()
            .map(|(at, (head, _))| {
                let heads = head.iter().map(|h| h.len());
                heads.chain(cells.iter().map(|row| row[at].len())).max()
            })
            .map(|width| width.unwrap_or(0))
            .collect();
        for line in 0..2 {
            let _ = write!(out, "{:first$}", ["", "policy"][line]);
            for ((head, _), width) in COLUMNS.iter().zip(&widths) {
                let _ = write!(out, "  {:>width$}", head[line]);
            }
            out.push('\n');
        }
        let total = first + widths.iter().map(|w| w + 2).sum::<usize>();
        let _ = writeln!(out, "{}", "-".repeat(total));
        for (policy, row) in self.policies.iter().zip(cells) {
            let _ = write!(out, "{:first$}", policy.policy);
            for (cell, width) in row.iter().zip(&widths) {
                let _ = write!(out, "  {cell:>width$}");
            }
            out.push('\n');
        }
    }

    fn effects(&self, out: &mut String) {
        for policy in &self.policies {
            for event in &policy.events {
                if event.sessions_there + event.requests_lost == 0 {
                    continue;
                }
                let _ = writeln!(
                    out,
                    "{}: `{}`: {} sessions lived there, {} have moved since; {} requests sent again",
                    policy.policy,
                    event.event,
                    event.sessions_there,
                    event.sessions_moved,
                    event.requests_lost
                );
            }
            if !self.events.is_empty() && policy.moves.total > 0 {
                let reasons: Vec<String> = policy
                    .moves
                    .by_reason
                    .iter()
                    .map(|(reason, n)| format!("{reason} {n}"))
                    .collect();
                let _ = writeln!(
                    out,
                    "{}: moves by reason: {}; from a living rank to one that came back: {}",
                    policy.policy,
                    reasons.join(", "),
                    policy.moves.to_returned
                );
            }
        }
    }
}

fn percent(rate: f64) -> String {
    format!("{:.2}", rate * 100.0)
}
