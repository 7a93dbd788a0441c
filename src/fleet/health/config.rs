//! How patient the data path is.

use std::time::Duration;

/// How patient the data path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthConfig {
    /// Failures in a row, of more than one prompt, that eject a rank.
    pub eject_after: u32,
    /// A rank with requests that gives none of them anything for so long, and for
    /// what its longest prompt takes, hangs.
    pub hang_after: Duration,
    /// Prompt tokens a second that the slowest engine computes.
    pub slowest_prefill: u32,
    /// Tokens a second that the slowest engine generates for one request.
    pub slowest_decode: u32,
    /// The first ejection lasts so long.
    pub first_term: Duration,
    /// No ejection lasts longer.
    pub longest_term: Duration,
    /// Probes in a row that end an ejection, and good beats in a row that end an
    /// illness.
    pub probes_to_return: u32,
    /// Trusted for so long, earlier ejections are forgotten.
    pub forgiven_after: Duration,
    /// So long after a rank was ejected because it hangs, what was sent there is
    /// given up for lost even when it answers no abort.
    pub fence_after: Duration,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            eject_after: 5,
            hang_after: Duration::from_secs(15),
            slowest_prefill: 2000,
            slowest_decode: 5,
            first_term: Duration::from_secs(5),
            longest_term: Duration::from_secs(300),
            probes_to_return: 2,
            forgiven_after: Duration::from_secs(600),
            fence_after: Duration::from_secs(5),
        }
    }
}

impl HealthConfig {
    /// How long an attempt is waited for: the engine may compute `prompt` tokens
    /// and generate `frame` tokens before it says anything.
    pub fn patience(&self, prompt: u32, frame: u32) -> Duration {
        let seconds = |tokens: u32, rate: u32| f64::from(tokens) / f64::from(rate.max(1));
        let work = seconds(prompt, self.slowest_prefill) + seconds(frame, self.slowest_decode);
        self.hang_after + Duration::try_from_secs_f64(work).unwrap_or(Duration::ZERO)
    }

    /// How long the ejection after so many others lasts.
    pub fn term(&self, ejections: u32) -> Duration {
        self.first_term
            .saturating_mul(1 << ejections.min(20))
            .min(self.longest_term)
    }
}
