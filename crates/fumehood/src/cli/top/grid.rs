//! Lines of styled text that fit a width, and tables that leave columns out until they do.

use crate::cli::print::Align;

/// How a piece of text looks on a terminal; elsewhere it is only text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    Plain,
    /// A table's head.
    Head,
    /// The line on top.
    Bar,
    Good,
    Bad,
    Warning,
    Faint,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line(pub Vec<(String, Ink)>);

impl Line {
    pub fn plain(text: impl Into<String>) -> Line {
        Line(vec![(text.into(), Ink::Plain)])
    }

    pub fn inked(text: impl Into<String>, ink: Ink) -> Line {
        Line(vec![(text.into(), ink)])
    }

    pub fn text(&self) -> String {
        let text: String = self.0.iter().map(|(text, _)| text.as_str()).collect();
        text.trim_end().to_owned()
    }

    pub fn width(&self) -> usize {
        self.0.iter().map(|(text, _)| text.chars().count()).sum()
    }

    /// At most so many characters; the last one says that there were more.
    pub fn cut(mut self, width: usize) -> Line {
        if self.width() <= width {
            return self;
        }
        let mut left = width.saturating_sub(1);
        for (text, _) in &mut self.0 {
            *text = text.chars().take(left).collect();
            left -= text.chars().count();
        }
        if width > 0 {
            self.0.push(("…".into(), Ink::Plain));
        }
        self
    }
}

pub struct Column {
    pub title: &'static str,
    pub align: Align,
    /// Those with the highest number are left out first; those with 0 never.
    pub spare: u8,
}

pub const fn column(title: &'static str, align: Align, spare: u8) -> Column {
    Column {
        title,
        align,
        spare,
    }
}

pub struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<(String, Ink)>>,
}

const GAP: &str = "  ";

impl Grid {
    pub fn new(columns: Vec<Column>) -> Grid {
        Grid {
            columns,
            rows: Vec::new(),
        }
    }

    pub fn row<const N: usize>(&mut self, cells: [(String, Ink); N]) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells.into());
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The head, then the rows.
    pub fn lines(&self, width: Option<usize>) -> Vec<Line> {
        let shown = self.shown(width.unwrap_or(usize::MAX));
        let head: Vec<(String, Ink)> = self
            .columns
            .iter()
            .map(|column| (column.title.to_owned(), Ink::Head))
            .collect();
        let all = std::iter::once(&head).chain(&self.rows);
        let line = |row: &Vec<(String, Ink)>| {
            let mut line = Line::default();
            for (n, (at, cell_width)) in shown.iter().enumerate() {
                if n > 0 {
                    line.0.push((GAP.to_owned(), Ink::Plain));
                }
                let (Some((text, ink)), Some(column)) = (row.get(*at), self.columns.get(*at))
                else {
                    continue;
                };
                let text = match column.align {
                    Align::Left => format!("{text:<cell_width$}"),
                    Align::Right => format!("{text:>cell_width$}"),
                };
                line.0.push((text, *ink));
            }
            match width {
                Some(width) => line.cut(width),
                None => line,
            }
        };
        all.map(line).collect()
    }

    /// Which columns there is room for, and how wide they are. One in which nobody has anything takes no room.
    fn shown(&self, width: usize) -> Vec<(usize, usize)> {
        let cell = |row: &Vec<(String, Ink)>, at: usize| {
            row.get(at).map_or(0, |(text, _)| text.chars().count())
        };
        let widest = |at: usize| self.rows.iter().map(|row| cell(row, at)).max().unwrap_or(0);
        let with_title = |(at, column): (usize, &Column)| match widest(at) {
            0 => None,
            n => Some((at, n.max(column.title.chars().count()))),
        };
        let mut shown: Vec<(usize, usize)> = self
            .columns
            .iter()
            .enumerate()
            .filter_map(with_title)
            .collect();
        let spare = |at: usize| self.columns.get(at).map_or(0, |column| column.spare);
        loop {
            let gaps = GAP.len() * shown.len().saturating_sub(1);
            let total: usize = shown.iter().map(|(_, width)| width).sum::<usize>() + gaps;
            let most = shown.iter().map(|(at, _)| spare(*at)).max().unwrap_or(0);
            if total <= width || most == 0 {
                return shown;
            }
            let last = shown.iter().rposition(|(at, _)| spare(*at) == most);
            last.map(|at| shown.remove(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        let mut grid = Grid::new(vec![
            column("ID", Align::Left, 0),
            column("AGE", Align::Right, 1),
            column("NONE", Align::Left, 0),
            column("BY", Align::Left, 2),
        ]);
        let cells = |cells: [&str; 4]| cells.map(|cell| (cell.to_owned(), Ink::Plain));
        grid.row(cells(["gwas-7", "3s", "", "ada"]));
        grid.row(cells(["x", "12m", "", "bob"]));
        grid
    }

    fn texts(width: Option<usize>) -> Vec<String> {
        let lines = grid().lines(width);
        lines.iter().map(Line::text).collect()
    }

    #[test]
    fn columns_are_left_out_until_it_fits() {
        assert_eq!(
            texts(None),
            ["ID      AGE  BY", "gwas-7   3s  ada", "x       12m  bob"]
        );
        assert_eq!(
            texts(Some(11)),
            ["ID      AGE", "gwas-7   3s", "x       12m"]
        );
        assert_eq!(texts(Some(10)), ["ID", "gwas-7", "x"]);
        assert_eq!(
            texts(Some(4)),
            ["ID  …", "gwa…", "x   …"].map(|l| {
                // Padding counts: what was cut off is told even where it was blank.
                let cut: String = l.chars().take(3).collect();
                format!("{cut}…")
            })
        );
        assert_eq!(texts(Some(0)), ["", "", ""]);
    }

    #[test]
    fn no_line_is_wider_than_the_screen() {
        for width in 0..20 {
            let lines = grid().lines(Some(width));
            assert!(lines.iter().all(|line| line.width() <= width), "{width}");
        }
    }
}
