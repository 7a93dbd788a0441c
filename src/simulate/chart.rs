//! The report as a picture: a row of bars for each policy. An SVG that needs
//! nothing else, with its own background, and colours for light and for dark.

use std::fmt::Write as _;

use super::report::{PolicyReport, Report};
use crate::harness::{chart::escape, table::count};

const LEFT: f64 = 150.0;
const PANEL: f64 = 200.0;
const GAP: f64 = 70.0;
const ROW: f64 = 30.0;
const TOP: f64 = 110.0;
const MARGIN: f64 = 20.0;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:13px;fill:#1f2328}\
.bg{fill:#ffffff}.title{font-size:17px;font-weight:600}.panel{font-size:14px;font-weight:600}\
.dim{fill:#59636e;font-size:12px}.bar{fill:#0a58ca}.track{fill:#eef1f4}\
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.dim{fill:#9198a1}\
.bar{fill:#6cb6ff}.track{fill:#21262d}}";

/// A column of bars.
struct Panel {
    title: &'static str,
    value: fn(&PolicyReport) -> f64,
    label: fn(f64) -> String,
    /// The longest bar; unset: the greatest value.
    whole: Option<f64>,
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "Hits, % of reachable",
        value: |p| p.hits_of_reachable * 100.0,
        label: |v| format!("{v:.1} %"),
        whole: Some(100.0),
    },
    Panel {
        title: "Makespan",
        value: |p| p.makespan_seconds,
        label: |v| format!("{v:.0} s"),
        whole: None,
    },
    Panel {
        title: "Turn latency, p95",
        value: |p| p.latency_seconds.p95,
        label: |v| format!("{v:.2} s"),
        whole: None,
    },
    Panel {
        title: "Load, max over mean",
        value: |p| p.balance.in_flight,
        label: |v| format!("{v:.2}"),
        whole: None,
    },
];

impl Report {
    /// The chart as an SVG document.
    pub fn chart(&self) -> String {
        let width = LEFT + (PANEL + GAP) * PANELS.len() as f64;
        let height = TOP + ROW * self.policies.len() as f64 + MARGIN;
        let (w, f) = (&self.workload, &self.fleet);
        let title = format!("Routing policies over {}", w.trace);
        let about = format!(
            "{} sessions, {} turns, {}; {} x {} ranks, {}; reachable {:.2} % of prompt tokens",
            count(w.sessions as u64),
            count(w.turns as u64),
            w.arrival,
            f.replicas,
            f.ranks_per_replica,
            f.accelerator,
            w.reachable_rate * 100.0
        );
        let mut out = String::new();
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\" aria-labelledby=\"title desc\">\n\
             <title id=\"title\">{}</title>\n<desc id=\"desc\">{}</desc>\n<style>{STYLE}</style>\n\
             <rect class=\"bg\" width=\"{width}\" height=\"{height}\"/>",
            escape(&title),
            escape(&about)
        );
        text(&mut out, MARGIN, 32.0, "title", &title);
        text(&mut out, MARGIN, 54.0, "dim", &about);
        for (row, policy) in self.policies.iter().enumerate() {
            text(&mut out, MARGIN, line(row) + 4.5, "", &policy.policy);
        }
        for (at, panel) in PANELS.iter().enumerate() {
            let left = LEFT + (PANEL + GAP) * at as f64;
            text(&mut out, left, TOP - 18.0, "panel", panel.title);
            self.bars(&mut out, panel, left);
        }
        out.push_str("</svg>\n");
        out
    }

    fn bars(&self, out: &mut String, panel: &Panel, left: f64) {
        let values = || self.policies.iter().map(panel.value);
        let whole = panel.whole.unwrap_or_else(|| values().fold(0.0, f64::max));
        for (row, value) in values().enumerate() {
            let share = if whole > 0.0 { value / whole } else { 0.0 };
            let length = PANEL * share.clamp(0.0, 1.0);
            let top = line(row) - 8.0;
            let _ = writeln!(
                out,
                "<rect class=\"track\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{PANEL:.1}\" height=\"16\"/>\n\
                 <rect class=\"bar\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"16\"/>"
            );
            let label = (panel.label)(value);
            text(out, left + PANEL + 6.0, line(row) + 4.5, "dim", &label);
        }
    }
}

/// The middle of a row.
fn line(row: usize) -> f64 {
    TOP + ROW * row as f64 + 8.0
}

fn text(out: &mut String, x: f64, y: f64, class: &str, content: &str) {
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
        escape(content)
    );
}
